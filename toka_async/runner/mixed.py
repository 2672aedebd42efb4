"""Begins steps of any rows from CUDA graphs: everything up to the last layer's attention, as one launch.

A graph computes a fixed number of tokens, filled up with padding, of decoding rows and chunks of prompts. One copy
brings all that it reads beside the rows' tables. The rest of the last layer and sampling follow for the sampled tokens
alone; the host launches them while the device computes. Without graphs, launching a step takes the host longer than a
GPU needs for some thousand tokens. Knows rows; knows no messages and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32, Int64
from toka_async.attention.base import AttentionBatch, ChunkRows, MixedAttention, PrefixGroup
from toka_async.attention.copies import pin
from toka_async.kernels.decode_rows import NEXT_TOKEN, begin_rows
from toka_async.runner.graphs import DecodeGraphs
from toka_async.runner.inputs import SampledTokens, StepModel, StepRows, find_saves, read_chunk_ids
from toka_async.runner.rows import RowTables
from toka_async.runner.token_history import TokenHistory

MOST_ROWS = 1024  # of a step: attention starts programs for as many as there may be


def list_mixed_sizes(most: int) -> list[int]:
    """Lists the numbers of tokens to capture, up to `most`. From 128 tokens on, padding is at most an eighth or 63."""
    sizes = [16, 32, 64, 128]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(64, sizes[-1] // 512 * 64))
    return sorted({min(size, most) for size in sizes})


class MixedPass:
    """Begins steps of up to the largest graph's tokens, without shared prefixes and with them."""

    def __init__(
        self,
        model: StepModel,
        attention: MixedAttention,
        rows: RowTables,
        history: TokenHistory | None,
        residuals: Callable[[int], Tensor] | None = None,
    ) -> None:
        """history: of a stage that samples. residuals: makes the memory from which graphs read residuals."""
        self._model = model
        self._attention = attention
        self._rows = rows
        self._history = history
        self._make_residuals = residuals
        self._residuals: Tensor | None = None
        self._inputs: dict[int, _GraphInputs] = {}
        self._outputs: tuple[Tensor, ...] = ()
        self._grouped = False
        self.graphs: DecodeGraphs | None = None

    def capture(self, sizes: Sequence[int], grouped: bool) -> Iterator[tuple[int, int]]:
        """Captures graphs of these numbers of tokens; yields (captured, all) after each. No row may run meanwhile.

        grouped: replays may have groups of shared prefixes.
        """
        self._grouped, self._outputs = grouped, ()
        self._inputs = {size: self._make_inputs(size) for size in sizes}
        rehearse = self._model.rehearse
        graphs = DecodeGraphs(
            lambda size, _: self._begin(size), {}, self._attention, sizes, least_grouped=0, rehearse=rehearse
        )
        with torch.inference_mode():
            if self._make_residuals is not None:
                self._residuals = self._make_residuals(max(sizes))
            yield from graphs.capture()
        self.graphs = graphs

    def can_replay(self, step_rows: StepRows) -> bool:
        size = 0 if self.graphs is None else self.graphs.find_size(step_rows.num_tokens)
        return size > 0 and step_rows.slots.size <= self._inputs[size].num_rows

    def replay(
        self, step_rows: StepRows, groups: tuple[PrefixGroup, ...], residuals: Tensor | None = None
    ) -> tuple[Tensor, Tensor, SampledTokens]:
        """Returns what `StepModel.begin` does, and what is sampled. It is in the graph's memory, up to the next replay.

        residuals: [t, hidden], on a stage that is not the first.
        """
        assert self.graphs is not None
        num_tokens = step_rows.num_tokens
        inputs = self._inputs[self.graphs.find_size(num_tokens)]
        inputs.fill(self._rows, step_rows, self._attention)
        if residuals is not None:
            assert self._residuals is not None
            self._residuals[:num_tokens].copy_(residuals)
        if self._grouped:
            self._attention.set_groups(groups)
        attended, residual = self.graphs.replay(num_tokens, ())
        return attended, residual, inputs.take_sampled(step_rows)

    def _make_inputs(self, num_tokens: int) -> _GraphInputs:
        num_rows = min(num_tokens, self._rows.params.size, MOST_ROWS)
        num_cells = self._attention.count_chunk_cells(num_tokens, num_rows)
        return _GraphInputs(num_tokens, num_rows, num_cells, self._rows.on_device.padding, self._rows.device)

    def _begin(self, size: int) -> tuple[Tensor, ...]:
        """Begins a step of so many tokens, padding included. Reads and writes tables and the graph's inputs."""
        inputs, rows, history = self._inputs[size], self._rows.on_device, self._history
        token_ids, positions, write_indices, _ = begin_rows(
            inputs.token_slots,
            rows.last_tokens,
            rows.positions,
            rows.page_table,
            rows.page_size,
            None if history is None else history.ids,
            (inputs.token_ids, inputs.positions),
        )
        batch = AttentionBatch(
            num_decode=inputs.num_rows,
            query_lengths=np.ones(inputs.num_rows, dtype=np.int32),
            context_lengths=np.ones(inputs.num_rows, dtype=np.int32),
            contexts=inputs.decode_contexts,
            slots=inputs.row_slots.long(),
            page_table=rows.page_table,
            write_indices=write_indices,
            windows=rows.describe_windows(write_indices),
        )
        self._attention.plan_mixed(batch, self._grouped, inputs.chunks)
        first = token_ids if self._residuals is None else self._residuals[:size]
        begun = self._model.begin(first, positions, self._attention)
        if not self._outputs:  # of the largest graph, for all of them: each would hold memory of its own
            self._outputs = tuple(torch.empty_like(output) for output in begun)
        for kept, output in zip(self._outputs, begun, strict=True):
            kept[:size].copy_(output)
        return tuple(kept[:size] for kept in self._outputs)


class _GraphInputs:
    """What a graph of `num_tokens` and up to `num_rows` reads: views of one int32 tensor, filled by one copy.

    token_ids, token_slots, positions: [t]. row_slots: [rows], of all rows. decode_contexts: [rows], of those that
    decode; 0: of the others. sampled, sample_slots, sample_contexts: [rows]. chunks: [cells], attention's.
    What a step leaves free is of the padding's slot.
    """

    def __init__(self, num_tokens: int, num_rows: int, num_cells: int, padding: int, device: torch.device) -> None:
        self.num_rows = num_rows
        sizes = [num_tokens] * 3 + [num_rows] * 5 + [num_cells]
        # Views begin at 16 bytes, so that kernels see one alignment only.
        self._sizes = [-(-size // 4) * 4 for size in sizes]
        self._padding = padding
        self._memory = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        (
            self.token_ids,
            self.token_slots,
            self.positions,
            self.row_slots,
            self.decode_contexts,
            self.sampled,
            self.sample_slots,
            self.sample_contexts,
            self.chunks,
        ) = (part[:size] for part, size in zip(torch.split(self._memory, self._sizes), sizes, strict=True))
        self._upload(self._make_empty()[0])

    def fill(self, rows: RowTables, step_rows: StepRows, attention: MixedAttention) -> None:
        slots, lengths, contexts = step_rows.slots, step_rows.lengths, step_rows.contexts
        split = step_rows.num_decode
        token_ids = np.full(split, NEXT_TOKEN.value, dtype=np.int32)
        if split < slots.size:
            token_ids = np.concatenate([token_ids, read_chunk_ids(rows, step_rows)])
        columns: tuple[Int32 | Int64, ...] = (
            token_ids,
            np.repeat(slots, lengths),
            np.repeat(contexts - lengths - step_rows.firsts, lengths) + np.arange(token_ids.size),
            slots,
            contexts[:split],
            *step_rows.list_sampled(),
        )
        values, (*parts, cells) = self._make_empty()
        for part, column in zip(parts, columns, strict=True):
            part[: column.size] = column
        sizes = len(self.token_ids), self.num_rows, split
        chunks = ChunkRows(*sizes, lengths[split:], contexts[split:], find_saves(step_rows))
        attention.describe_chunks(cells[: len(self.chunks)], chunks)
        self._upload(values)

    def take_sampled(self, step_rows: StepRows) -> SampledTokens:
        """Returns the sampled part of what was filled in."""
        count = int(step_rows.samples.sum())
        tokens = None if count == step_rows.num_tokens else self.sampled[:count].long()
        return SampledTokens(tokens, self.sample_slots[:count].long(), self.sample_contexts[:count])

    def _make_empty(self) -> tuple[Int32, list[Int32]]:
        """Makes the values of a step without rows, and their parts."""
        values = np.zeros(self._memory.numel(), dtype=np.int32)
        parts = np.split(values, np.cumsum(self._sizes)[:-1])
        for slots in (parts[1], parts[3]):
            slots[:] = self._padding
        return values, parts

    def _upload(self, values: Int32) -> None:
        # In the stream's order: a replay under way has read the old values before the copy.
        self._memory.copy_(pin(values, self._memory.device), non_blocking=True)
