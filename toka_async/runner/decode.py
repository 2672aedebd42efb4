"""Computes a pass of decoding rows on a GPU, from the device's tables to the rows' next tokens, captured in graphs.

In a pipeline, a pass may begin or end with residuals in place of tokens. Knows rows and sampling; knows no messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.base import AttentionBatch, GraphAttention, PrefixGroup
from toka_async.model.sampling import sample
from toka_async.runner.device_rows import DecodeInputs
from toka_async.runner.graphs import DecodeGraphs
from toka_async.runner.inputs import StepModel, StepRows
from toka_async.runner.kernel_sampler import KernelSampler
from toka_async.runner.rows import RowTables
from toka_async.runner.samples import Draws, RowShares
from toka_async.runner.slab_sampler import SlabDraw
from toka_async.runner.token_history import TokenHistory

_KINDS = 64  # arrays of slots that are remembered: as many as a step has micro-batches at most


class DecodePass:
    """Computes steps of decoding rows alone, without the host; captured if `attention` is not None.

    sampler: draws with kernels, from parameters that stay on the device; None on a stage that does not sample.
    """

    def __init__(
        self,
        model: StepModel,
        attention: GraphAttention | None,
        rows: RowTables,
        history: TokenHistory | None,
        shares: RowShares | None = None,
        residuals: Callable[[int], Tensor] | None = None,
        draw: SlabDraw = sample,
    ) -> None:
        """history: of a stage that samples. residuals: makes the memory from which graphs read residuals.

        draw: samples the rows that kernels do not.
        """
        self._model = model
        self._attention = attention
        self._rows = rows
        self._history = history
        self._make_residuals = residuals
        self._residuals: Tensor | None = None
        self.sampler = None if history is None else KernelSampler(model.logits, rows, history, shares, draw)
        self.graphs: DecodeGraphs | None = None
        # Arrays of slots, whether kernels sample them all, and whether any wants log-probs; the newest last.
        self._kinds: deque[tuple[Int32, bool, bool]] = deque(maxlen=_KINDS)

    @property
    def can_capture(self) -> bool:
        return self._attention is not None

    def capture(self, sizes: Sequence[int], grouped: bool) -> Iterator[tuple[int, int]]:
        """Captures graphs of these numbers of rows; yields (captured, all) after each. No row may decode meanwhile."""
        assert self._attention is not None
        assert not self._rows.order.size
        most = max(sizes)
        # No row decodes now: from here on padding computes.
        self._rows.on_device.set_order(self._rows.order, most)
        graphs = DecodeGraphs(self._decode, self._attention, sizes, grouped)
        with torch.inference_mode():
            if self._make_residuals is not None:
                self._residuals = self._make_residuals(most)
            yield from graphs.capture()
        self.graphs = graphs

    def count_padded(self, order: Int32) -> int:
        """Counts the rows that a pass of these computes, padding included."""
        size = 0 if self.graphs is None else self.graphs.find_size(order.size)
        return size or order.size

    def can_replay(self, step_rows: StepRows, grouped: bool) -> bool:
        """Tells whether a graph can compute the step: it has no chunks, not too many rows, and kernels sample all."""
        num_rows = step_rows.num_decode
        if self.graphs is None or step_rows.slots.size != num_rows or not self.graphs.has(num_rows, grouped):
            return False
        return self.sampler is None or self._find_kind(self.sampler, step_rows.slots)[0]

    def replay(
        self, step_rows: StepRows, groups: tuple[PrefixGroup, ...], residuals: Tensor | None = None
    ) -> tuple[Draws | None, Tensor | None]:
        """Returns the rows' next tokens, or on a stage that does not sample their residuals [n, hidden].

        They are in the graph's memory, up to the next replay. residuals: [n, hidden], on a stage that is not the first.
        """
        assert self.graphs is not None
        if residuals is not None:
            assert self._residuals is not None
            self._residuals[: len(residuals)].copy_(residuals)
        outputs = self.graphs.replay(step_rows.num_decode, groups)
        if self.sampler is None:
            return None, outputs[0]
        token_ids, logprobs = outputs
        return Draws(token_ids, logprobs if self._find_kind(self.sampler, step_rows.slots)[1] else None), None

    def _find_kind(self, sampler: KernelSampler, slots: Int32) -> tuple[bool, bool]:
        """Tells whether kernels sample all rows, and whether any wants log-probs. Remembered by array of slots."""
        for kind in self._kinds:
            if kind[0] is slots:
                return kind[1:]
        self._kinds.append((slots, sampler.are_fast(slots), sampler.wants_logprobs(slots)))
        return self._kinds[-1][1:]

    def _decode(self, num_rows: int, grouped: bool) -> tuple[Tensor, ...]:
        """Decodes the first rows in the device's order, padding included. Reads and writes tables, takes no inputs."""
        rows = self._rows.on_device
        inputs = rows.decode_inputs(num_rows)
        batch = AttentionBatch(
            num_decode=num_rows,
            query_lengths=np.ones(num_rows, dtype=np.int32),
            context_lengths=np.ones(num_rows, dtype=np.int32),
            contexts=inputs.contexts,
            slots=inputs.slots,
            page_table=rows.page_table,
            write_indices=inputs.write_indices,
        )
        assert self._attention is not None
        self._attention.plan_graph(batch, grouped)
        if self._history is not None:
            self._history.write(inputs.write_indices, inputs.token_ids)
        hidden = self._model.forward(self._make_first(inputs), inputs.positions, self._attention)
        rows.advance(inputs.slots, inputs.contexts)
        if self.sampler is None:
            return (hidden,)
        token_ids, logprobs = self.sampler.draw(hidden, inputs.slots, inputs.contexts)
        rows.set_sampled(inputs.slots, token_ids)
        return token_ids, logprobs

    def _make_first(self, inputs: DecodeInputs) -> Tensor:
        """Returns what the first layer reads."""
        return inputs.token_ids if self._residuals is None else self._residuals[: len(inputs.slots)]
