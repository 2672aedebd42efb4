"""Computes a pass of decoding rows on a GPU, from the device's tables to the rows' next tokens, captured in graphs.

In a pipeline, a pass may begin or end with residuals in place of tokens. Knows rows and sampling; knows no messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.base import AttentionBatch, GraphAttention, PrefixGroup
from toka_async.kernels.decode_rows import begin_rows
from toka_async.model.sampling import sample
from toka_async.runner.device_rows import DecodeInputs
from toka_async.runner.graphs import DecodeEnd, DecodeGraphs
from toka_async.runner.inputs import StepModel, StepRows
from toka_async.runner.kernel_sampler import KernelSampler
from toka_async.runner.rows import RowTables
from toka_async.runner.samples import Draws, RowShares, pack_drawn
from toka_async.runner.sampling_routes import Route
from toka_async.runner.slab_sampler import SlabDraw
from toka_async.runner.token_history import TokenHistory


class DecodePass:
    """Computes steps of decoding rows alone, without the host; captured if `attention` is not None.

    The model's graph ends with the rows' hidden states. Sampling is captured apart; steps with rows that only plain
    torch samples leave it out.

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
        self._hidden: Tensor | None = None  # of a replay that plain torch samples: [most rows, hidden]
        self.sampler = None if history is None else KernelSampler(model.logits, rows, history, shares, draw)
        self.graphs: DecodeGraphs | None = None

    @property
    def can_capture(self) -> bool:
        return self._attention is not None

    def capture(self, sizes: Sequence[int], least_grouped: int) -> Iterator[tuple[int, int]]:
        """Captures graphs of these numbers of rows; yields (captured, all) after each. No row may decode meanwhile.

        least_grouped: see `DecodeGraphs`.
        """
        assert self._attention is not None
        self.fill(max(sizes))
        ends: dict[str, DecodeEnd] = {}
        if self.sampler is not None:
            full = (self._draw_full,) if self.sampler.is_shared else (self._compute_logits, self._draw_edited)
            ends = {Route.PLAIN: (self._draw,), Route.FULL: full, Route.TORCH: (self._keep_hidden,)}
        graphs = DecodeGraphs(self._decode, ends, self._attention, sizes, least_grouped, self._model.rehearse)
        with torch.inference_mode():
            yield from graphs.capture()
        self.graphs = graphs

    def fill(self, most: int) -> None:
        """Makes padding of the first rows, up to `most`, so that steps compute without requests. No row may decode."""
        assert not self._rows.order.size
        self._rows.on_device.set_order(self._rows.order, most)
        if self._make_residuals is not None:
            with torch.inference_mode():
                self._residuals = self._make_residuals(most)

    def compute_padding(self, num_rows: int) -> None:
        """Computes a step of padding, as a graph holds it, but launched by the host. `fill` must have made so much."""
        outputs = self._decode(num_rows, grouped=False)
        if self.sampler is not None:
            self._draw(outputs)

    def count_padded(self, order: Int32) -> int:
        """Counts the rows that a pass of these computes, padding included."""
        size = 0 if self.graphs is None else self.graphs.find_size(order.size)
        return size or order.size

    def can_replay(self, step_rows: StepRows, grouped: bool) -> bool:
        """Tells whether a graph can compute the step: it has no chunks and not too many rows."""
        num_rows = step_rows.num_decode
        return self.graphs is not None and step_rows.slots.size == num_rows and self.graphs.has(num_rows, grouped)

    def replay(
        self,
        step_rows: StepRows,
        groups: tuple[PrefixGroup, ...],
        residuals: Tensor | None = None,
        before_draw: Callable[[], None] | None = None,
    ) -> tuple[Draws | None, Tensor | None]:
        """Returns the rows' next tokens, or on a stage that does not sample their residuals [n, hidden].

        They are in the graph's memory, up to the next replay. residuals: [n, hidden], on a stage that is not the first.
        before_draw: called when the model is launched, with the logits if it can be, and the draw is not.
        """
        assert self.graphs is not None
        if residuals is not None:
            assert self._residuals is not None
            self._residuals[: len(residuals)].copy_(residuals)
        num_rows = step_rows.num_decode
        if self.sampler is None:
            return None, self.graphs.replay(num_rows, groups)[0]
        needs = self.sampler.find_needs(step_rows.slots)
        outputs = self.graphs.replay(num_rows, groups, needs.route, before_draw)
        if needs.route is Route.TORCH:
            return self._sample(self.sampler, outputs[0], step_rows), None
        return self.sampler.make_draws(needs, outputs), None

    def _sample(self, sampler: KernelSampler, hidden: Tensor, step_rows: StepRows) -> Draws:
        """Samples after a replay, from the rows' hidden states [n, hidden]."""
        rows = self._rows.on_device
        slots = rows.order[: len(hidden)]
        contexts = rows.positions.index_select(0, slots).to(torch.int32)
        draws = sampler.sample(hidden, step_rows.slots, step_rows.contexts, slots, contexts)
        rows.set_sampled(slots, draws.token_ids)
        return draws

    def _decode(self, num_rows: int, grouped: bool) -> tuple[Tensor, ...]:
        """Decodes the first rows in the device's order, padding included. Reads and writes tables, takes no inputs."""
        rows = self._rows.on_device
        inputs = self._begin(num_rows)
        batch = AttentionBatch(
            num_decode=num_rows,
            query_lengths=np.ones(num_rows, dtype=np.int32),
            context_lengths=np.ones(num_rows, dtype=np.int32),
            contexts=inputs.contexts,
            slots=inputs.slots,
            page_table=rows.page_table,
            write_indices=inputs.write_indices,
            windows=rows.describe_windows(inputs.write_indices),
        )
        assert self._attention is not None
        self._attention.plan_graph(batch, grouped)
        hidden = self._model.forward(self._make_first(inputs), inputs.positions, self._attention)
        return (hidden,) if self.sampler is None else (hidden, inputs.contexts)

    def _begin(self, num_rows: int) -> DecodeInputs:
        """Takes the rows' next tokens into the history and their slots' positions."""
        rows, history = self._rows.on_device, None if self._history is None else self._history.ids
        slots = rows.order[:num_rows]
        tables = rows.last_tokens, rows.positions, rows.page_table
        return DecodeInputs(slots, *begin_rows(slots, *tables, rows.page_size, history))

    def _draw(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Draws the next tokens of the rows that `_decode` computed, padding included, on the plain route."""
        assert self.sampler is not None
        return self._draw_with(self.sampler.draw, *outputs)

    def _draw_full(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.sampler is not None
        return self._draw_with(self.sampler.draw_full, *outputs)

    def _compute_logits(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, contexts = outputs
        return self._model.logits(hidden), contexts

    def _draw_edited(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.sampler is not None
        return self._draw_with(self.sampler.draw_edited, *outputs)

    def _draw_with(
        self, draw: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], inputs: Tensor, contexts: Tensor
    ) -> tuple[Tensor, ...]:
        """inputs: the rows' hidden states or logits, as `draw` takes them."""
        slots = self._rows.on_device.order[: len(inputs)]
        drawn = draw(inputs, slots, contexts)
        self._rows.on_device.set_sampled(slots, drawn[0])
        return pack_drawn(drawn)

    def _keep_hidden(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copies the hidden states to where they stay while the host launches what samples them."""
        hidden = outputs[0]
        if self._hidden is None:  # the first run has the most rows
            self._hidden = torch.empty_like(hidden)
        return (self._hidden[: len(hidden)].copy_(hidden),)

    def _make_first(self, inputs: DecodeInputs) -> Tensor:
        """Returns what the first layer reads."""
        return inputs.token_ids if self._residuals is None else self._residuals[: len(inputs.slots)]
