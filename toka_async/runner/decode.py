"""A pass of decoding rows on a GPU, from the device's tables to the rows' next tokens, captured in graphs.

Knows the rows and how they sample; knows no messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.base import AttentionBatch, GraphAttention, PrefixGroup
from toka_async.runner.graphs import Agree, DecodeGraphs, graph_sizes
from toka_async.runner.history import History
from toka_async.runner.inputs import StepRows
from toka_async.runner.kernel_sampler import KernelSampler
from toka_async.runner.row_shares import RowShares
from toka_async.runner.rows import Rows
from toka_async.runner.samples import Samples


class DecodePass:
    """What a step of decoding rows alone computes, without the host; captured where `attention` can be.

    sampler: by kernels, over parameters that stay on the device.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        attention: GraphAttention | None,
        rows: Rows,
        history: History,
        agree: Agree = bytes,
        shares: RowShares | None = None,
    ) -> None:
        """agree: see `DecodeGraphs`."""
        self._forward = forward
        self._attention = attention
        self._agree = agree
        self._rows = rows
        self._history = history
        self.sampler = KernelSampler(head, rows, history, shares)
        self._graphs: DecodeGraphs | None = None
        self._fast: tuple[Int32, bool, bool] | None = None  # an order, whether it is fast, whether it wants log-probs

    def capture(self, most: int, grouped: bool) -> Iterator[tuple[int, int]]:
        """Capture graphs of up to `most` rows; gives (captured, all) after each. No row decodes meanwhile."""
        if self._attention is None:
            return
        assert not self._rows.order.size
        # What was there before has left: from here on it is padding that computes.
        self._rows.on_device.set_order(self._rows.order, most)
        graphs = DecodeGraphs(self._decode, self._attention, graph_sizes(most), grouped, self._agree)
        with torch.inference_mode():
            yield from graphs.capture()
        self._graphs = graphs

    def padded(self, order: Int32) -> int:
        """Rows that a pass of these takes, padding included."""
        size = 0 if self._graphs is None else self._graphs.size_for(order.size)
        return size or order.size

    def can_replay(self, step_rows: StepRows, grouped: bool) -> bool:
        """Whether a graph computes the step: no chunks, not too many rows, and all sampled by kernels."""
        num_rows = step_rows.num_decode
        if self._graphs is None or step_rows.slots.size != num_rows or not self._graphs.has(num_rows, grouped):
            return False
        return self._kind_of(step_rows.slots)[0]

    def replay(self, step_rows: StepRows, groups: tuple[PrefixGroup, ...]) -> Samples:
        """The rows' next tokens; they stay in the graph's memory until the next replay."""
        assert self._graphs is not None
        token_ids, logprobs = self._graphs.replay(step_rows.num_decode, groups)
        return Samples(token_ids, logprobs if self._kind_of(step_rows.slots)[1] else None)

    def _kind_of(self, order: Int32) -> tuple[bool, bool]:
        """Whether kernels sample all rows, and whether any wants log-probs; looked up once an order."""
        if self._fast is None or self._fast[0] is not order:
            self._fast = order, self.sampler.all_fast(order), self.sampler.wants_logprobs(order)
        return self._fast[1:]

    def _decode(self, num_rows: int, grouped: bool) -> tuple[Tensor, Tensor]:
        """The first rows in the device's order, padding included: reads and writes tables, takes no inputs."""
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
        self._history.write(inputs.write_indices, inputs.token_ids)
        hidden = self._forward(inputs.token_ids, inputs.positions)
        token_ids, logprobs = self.sampler.draw(hidden, inputs.slots, inputs.contexts)
        rows.advance(inputs.slots, inputs.contexts)
        rows.sampled(inputs.slots, token_ids)
        return token_ids, logprobs
