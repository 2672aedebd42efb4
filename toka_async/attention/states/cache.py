"""The recurrent states of sequences: of rows by their slots, one for padding, and snapshots of the scheduler's.

Knows no tokens. The states of all layers of a sequence lie together, so that one copy takes them all.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch

from toka_async.arrays import Int32
from toka_async.attention.copies import to_device
from toka_async.kernels.delta.layer import DeltaShape
from toka_async.memory.host import discard_memory
from toka_async.memory.virtual import NOT_MAPPED, MemoryStaysError, VirtualMemory, map_memory, view_memory


class StateCache:
    """States of `max_seqs` slots, of padding, and `num_snapshots` more.

    recurrent: [states, layers, value heads, key_dim, value_dim], sums over all tokens. inputs: [states, layers,
    width - 1, channels], the newest inputs of the convolution, oldest first.
    """

    def __init__(
        self,
        shape: DeltaShape,
        num_layers: int,
        max_seqs: int,
        num_snapshots: int,
        dtype: torch.dtype,
        device: torch.device,
        can_sleep: bool = False,
        stored: torch.dtype = torch.float32,
    ) -> None:
        """dtype: of inputs. can_sleep: a GPU's memory can be given back and taken again. stored: of `recurrent`."""
        self.shape = shape
        self.padding = max_seqs
        self.first_snapshot = max_seqs + 1
        self.device = device
        num_states = max_seqs + 1 + num_snapshots
        recurrent = (num_states, num_layers, shape.num_value_heads, shape.key_dim, shape.value_dim)
        inputs = (num_states, num_layers, shape.width - 1, shape.num_channels)
        self._memory: VirtualMemory | None = None
        sizes = [stored.itemsize * prod(recurrent), dtype.itemsize * prod(inputs)]
        if can_sleep and device.type == "cuda":
            self._memory = map_memory(sum(sizes), device)
        if self._memory is not None:
            first, second = torch.split(view_memory(self._memory, device)[: sum(sizes)], sizes)
            self.recurrent = first.view(stored).view(recurrent).zero_()
            self.inputs = second.view(dtype).view(inputs).zero_()
        else:
            self.recurrent = torch.zeros(recurrent, dtype=stored, device=device)
            self.inputs = torch.zeros(inputs, dtype=dtype, device=device)
        self._is_released = False

    @property
    def num_bytes(self) -> int:
        return self.recurrent.nbytes + self.inputs.nbytes

    @property
    def mapped_bytes(self) -> int:
        """See `KVCache.mapped_bytes`."""
        return 0 if self._memory is None else self._memory.mapped_bytes

    def begin(self, slots: Int32, snapshots: Int32) -> None:
        """Begins rows with the states of snapshots; -1, or no snapshots: without a state, which is zeros."""
        snapshots = snapshots if snapshots.size else np.full_like(slots, -1)
        for snapshot in sorted(set(snapshots.tolist())):
            targets = to_device(slots[snapshots == snapshot].astype(np.int64), self.device)
            for states in (self.recurrent, self.inputs):
                if snapshot < 0:
                    states.index_fill_(0, targets, 0)
                else:
                    source = states[
                        self.first_snapshot + snapshot
                    ].clone()  # index_copy_ takes no part of its own memory
                    states.index_copy_(0, targets, source.expand(len(targets), *source.shape))

    def release(self) -> None:
        """Gives the memory back, and keeps its addresses. Raises MemoryStaysError on a GPU that maps no memory."""
        if self.device.type == "cuda":
            if self._memory is None:
                raise MemoryStaysError(NOT_MAPPED)
            self._memory.release()
        else:
            discard_memory(self.recurrent)
            discard_memory(self.inputs)
        self._is_released = True

    def restore(self) -> None:
        """Takes the memory again, if it was given back; all states are zeros. Raises MemoryStaysError."""
        if not self._is_released:
            return
        if self._memory is not None:
            self._memory.restore()
        self.recurrent.zero_()
        self.inputs.zero_()
        self._is_released = False
