"""`StateOps` with Triton kernels: a step of the recurrence for decoding rows, pieces at once for chunks of prompts.

Rows take the time of reading and writing their states, and use all of a GPU's memory rate. Chunks take longer than
their reads, in fewer programs than fill a GPU. So a step with both computes them side by side.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.base import AttentionBatch, ChunkRows
from toka_async.attention.copies import to_device
from toka_async.attention.states.cache import StateCache
from toka_async.attention.states.cells import ChunkCells
from toka_async.attention.states.pieces import cut_chunks
from toka_async.kernels.delta.chunks import choose_programs, count_piece_tokens, count_programs, read_chunks
from toka_async.kernels.delta.convolution import convolve, keep_inputs
from toka_async.kernels.delta.layer import DeltaWeights, Programs, StepChunks
from toka_async.kernels.delta.norm import norm_outputs
from toka_async.kernels.delta.step import step_states


class TritonStateOps:
    """Also a `GraphStateOps`. What is captured reads the rows' slots and the chunks from device memory."""

    def __init__(self, cache: StateCache) -> None:
        self._cache = cache
        self._slots = torch.empty(0, dtype=torch.int64, device=cache.device)  # of decoding rows
        self._chunks: StepChunks | None = None
        self._piece_tokens = count_piece_tokens(cache.inputs.dtype)
        self._most = count_programs(cache.shape.num_value_heads, cache.device)  # programs of a step with rows
        self._beside: torch.cuda.Stream | None = None  # computes chunks, beside rows if there are any
        if cache.device.type == "cuda":
            # High priority: otherwise the programs of decoding rows would occupy the GPU first.
            self._beside = torch.cuda.Stream(cache.device, priority=-1)  # type: ignore[no-untyped-call]

    def plan(self, batch: AttentionBatch) -> None:
        first, lengths = batch.num_decode, batch.query_lengths[batch.num_decode :]
        self._slots, self._chunks = batch.slots[:first], None
        if batch.states is None or not lengths.size:
            return
        cut = cut_chunks(lengths, batch.states, first, self._piece_tokens, self._cache.first_snapshot)
        num_pieces, num_chunks = len(cut.pieces), len(cut.chunks)
        layout = ChunkCells(int(batch.query_lengths.sum()), num_pieces, num_chunks)
        cells = np.zeros(layout.count, dtype=np.int32)
        programs = Programs(num_pieces, num_chunks, num_chunks)
        if first:
            programs = choose_programs(first, layout.num_tokens - first, self._most).limit(num_pieces, num_chunks)
        layout.fill(cells, cut, batch.states, first, lengths, programs)
        self._chunks = layout.read(to_device(cells, self._cache.device), programs)

    def plan_graph(self, batch: AttentionBatch) -> None:
        self._slots, self._chunks = batch.slots, None

    def count_cells(self, num_tokens: int, num_rows: int) -> int:
        return _make_layout(num_tokens, num_rows).count

    def describe(self, cells: Int32, chunks: ChunkRows) -> None:
        cut = cut_chunks(
            chunks.lengths, chunks.states, chunks.num_decode, self._piece_tokens, self._cache.first_snapshot
        )
        layout = _make_layout(chunks.num_tokens, chunks.num_rows)
        chosen = choose_programs(chunks.num_decode, int(chunks.lengths.sum()), self._most)
        programs = chosen.limit(layout.num_pieces, layout.num_chunks)
        layout.fill(cells, cut, chunks.states, chunks.num_decode, chunks.lengths, programs)

    def plan_mixed(self, batch: AttentionBatch, cells: Tensor) -> None:
        num_tokens, num_rows = len(batch.write_indices), batch.num_decode
        # Rows that do not decode have no context.
        self._slots = torch.where(batch.contexts > 0, batch.slots, self._cache.padding)
        layout = _make_layout(num_tokens, num_rows)
        self._chunks = layout.read(cells, self._most.limit(layout.num_pieces, layout.num_chunks))

    def compute(self, layer: int, inputs: Tensor, z: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        cache, shape, chunks, num_rows = self._cache, self._cache.shape, self._chunks, len(self._slots)
        recurrent, newest = cache.recurrent[:, layer], cache.inputs[:, layer]
        kernel = weights.convolution, shape, cache.padding
        output = inputs.new_empty(len(inputs), shape.num_values)
        beside = None if chunks is None else self._beside
        if beside is not None:
            beside.wait_stream(torch.cuda.current_stream())
        read: Tensor | None = None
        if chunks is not None:
            with nullcontext() if beside is None else torch.cuda.stream(beside):
                convolved = convolve(inputs, newest, chunks.slots, chunks.offsets, *kernel)
                keep_inputs(inputs, newest, chunks, shape)
                read = read_chunks(convolved, gates, recurrent, chunks, weights, shape)
        if num_rows:
            convolved = convolve(inputs[:num_rows], newest, self._slots, None, *kernel)
            own = z[:num_rows], gates[:num_rows], recurrent, self._slots
            step_states(convolved, *own, weights, shape, cache.padding, output[:num_rows])
        if beside is not None:
            torch.cuda.current_stream().wait_stream(beside)
        if read is not None:
            assert chunks is not None
            # Last: rows with which a graph is filled up have written to the places of chunks' tokens.
            norm_outputs(read, z, chunks.offsets, weights.norm, weights.eps, output)
        return output


def _make_layout(num_tokens: int, num_rows: int) -> ChunkCells:
    """Makes the layout of any step that a graph of so many tokens and rows computes."""
    return ChunkCells(num_tokens, num_tokens, num_rows)
