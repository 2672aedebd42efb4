"""Sends tensors between the stages of a pipeline, from rank to rank, in order, without the host waiting for them.

A link is a process group of two ranks, for one direction. On GPUs NCCL's streams wait: the computing stream waits for a
tensor when it is taken, and a buffer is not written while it is still being sent. On CPUs (gloo) the host waits.
Buffers stay where they are. Knows no rows and no model.

The tensor ranks of a stage hold the same residuals. Between machines each sends its part of the rows only, to the equal
rank of the next stage, and the ranks there gather them: the network between machines is slower than the one within.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from toka_async.model.comm import Comm, LocalComm


@dataclass(slots=True)
class _Place:
    """A buffer of a ring. free: an event after the last read of the buffer. work: the transfer that uses it."""

    buffer: Tensor
    free: torch.cuda.Event | None
    work: dist.Work | None = None


def count_own_rows(num_rows: int, comm: Comm) -> int:
    """Counts the rows of a rank's part; the last parts may be shorter, or empty, and are sent as long."""
    return -(-num_rows // comm.size)


class Sender:
    """The sending end of a link. It copies tensors, so they can be overwritten at once."""

    def __init__(
        self, group: dist.ProcessGroup, target: int, buffers: Sequence[Tensor], comm: Comm | None = None
    ) -> None:
        """target: the rank in the group. buffers: one for each tensor under way, of the longest part's shape [n, …].

        comm: the ranks that hold the same and send a part each; None: this one sends all.
        """
        self._comm = comm or LocalComm()
        self._group = group
        self._target = target
        self._ring = deque(_Place(buffer, None) for buffer in buffers)

    def send(self, x: Tensor) -> None:
        """Sends [n, …], n >= 1."""
        place = self._ring[0]
        self._ring.rotate(-1)
        if place.work is not None:
            place.work.wait()
        num_own = count_own_rows(len(x), self._comm)
        own = x[self._comm.rank * num_own :][:num_own]
        view = place.buffer[:num_own]
        view[: len(own)].copy_(own)
        place.work = dist.isend(view, group=self._group, group_dst=self._target)


class Receiver:
    """The receiving end of a link. Tensors are received and taken in the order of `post`.

    Post a receive only when all that its sender waits for is launched here: what comes later may wait for it.
    """

    def __init__(
        self, group: dist.ProcessGroup, source: int, buffers: Sequence[Tensor], comm: Comm | None = None
    ) -> None:
        """source: the rank in the group. buffers: one for each tensor that may be posted and not released.

        comm: the ranks that receive a part each, and gather them; None: this one receives all.
        """
        self._comm = comm or LocalComm()
        self._group = group
        self._source = source
        self._on_gpu = buffers[0].device.type == "cuda"
        self._free = deque(_Place(buffer, self._record_event()) for buffer in buffers)
        self._posted: deque[tuple[_Place, int]] = deque()
        self._taken: deque[_Place] = deque()
        # NCCL begins to receive when the calling stream gets there, and the computing stream is busy.
        self._stream = torch.cuda.Stream(buffers[0].device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def is_full(self) -> bool:
        """Tells whether something must be released before the next `post`."""
        return not self._free

    @property
    def num_posted(self) -> int:
        """How many tensors are posted and not taken."""
        return len(self._posted)

    def post(self, count: int) -> None:
        """Begins to receive [count, …], count >= 1."""
        place = self._free.popleft()
        view = place.buffer[: count_own_rows(count, self._comm)]
        if self._stream is None:
            place.work = dist.irecv(view, group=self._group, group_src=self._source)
        else:
            assert place.free is not None
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(place.free)
                place.work = dist.irecv(view, group=self._group, group_src=self._source)
        self._posted.append((place, count))

    def take(self) -> Tensor:
        """Takes the tensor that was posted first; the device waits for it. It stays until it is released."""
        place, count = self._posted.popleft()
        assert place.work is not None
        place.work.wait()
        self._taken.append(place)
        return self._comm.all_gather(place.buffer[: count_own_rows(count, self._comm)], 0)[:count]

    def release(self) -> None:
        """Frees the buffer that was taken first, once the device has done what is launched so far."""
        place = self._taken.popleft()
        if place.free is not None:
            place.free.record()
        self._free.append(place)

    def discard(self) -> None:
        """Takes and releases all that is posted: nobody wants it any more."""
        while self._posted:
            self.take()
            self.release()

    def _record_event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]


@dataclass(slots=True, frozen=True)
class StageLinks:
    """A rank's links to the equal ranks of other stages; None where there is none.

    before, after: residuals from the stage before and to the one after it, [t, hidden]. tokens_from_last (on the first
    stage), tokens_to_first (on the last): sampled tokens, int64 [s].
    """

    before: Receiver | None = None
    after: Sender | None = None
    tokens_from_last: Receiver | None = None
    tokens_to_first: Sender | None = None
