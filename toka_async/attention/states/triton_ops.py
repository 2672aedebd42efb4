"""`StateOps` with Triton kernels: a step of the recurrence for decoding rows, pieces at once for chunks of prompts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toka_async.attention.base import AttentionBatch
from toka_async.attention.copies import to_device
from toka_async.attention.states.cache import StateCache
from toka_async.attention.states.pieces import cut_chunks
from toka_async.kernels.delta.chunks import count_piece_tokens, norm_outputs, read_chunks
from toka_async.kernels.delta.convolution import convolve, keep_inputs
from toka_async.kernels.delta.layer import DeltaWeights
from toka_async.kernels.delta.step import step_states


class TritonStateOps:
    def __init__(self, cache: StateCache) -> None:
        self._cache = cache
        none = torch.empty(0, dtype=torch.int32, device=cache.device)
        self._slots = none  # of decoding rows
        self._pieces, self._chunks = none, none  # see `ChunkPieces`
        self._token_slots, self._offsets = none, none  # of the chunks' tokens

    def plan(self, batch: AttentionBatch) -> None:
        self._slots = batch.slots[: batch.num_decode]
        lengths, device = batch.query_lengths[batch.num_decode :], self._cache.device
        if batch.states is None or not lengths.size:
            self._chunks = self._chunks[:0]
            return
        cut = cut_chunks(batch, count_piece_tokens(self._cache.inputs.dtype), self._cache.first_snapshot)
        firsts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        offsets = (np.arange(firsts.size) - firsts).astype(np.int32)
        parts = cut.pieces.ravel(), cut.chunks.ravel(), np.repeat(batch.states.slots, lengths), offsets
        sizes = [part.size for part in parts]
        cells = to_device(np.concatenate(parts), device)
        pieces, chunks, self._token_slots, self._offsets = torch.split(cells, sizes)
        self._pieces, self._chunks = pieces.view(-1, 3), chunks.view(-1, 3)

    def plan_graph(self, batch: AttentionBatch) -> None:
        self._slots, self._chunks = batch.slots, self._chunks[:0]

    def compute(self, layer: int, inputs: Tensor, z: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        cache, shape, num_decode = self._cache, self._cache.shape, len(self._slots)
        recurrent, newest = cache.recurrent[:, layer], cache.inputs[:, layer]
        outputs = []
        if num_decode:
            rows = inputs[:num_decode]
            convolved = convolve(rows, newest, self._slots, None, weights.convolution, shape, cache.padding)
            states = recurrent, self._slots, weights, shape, cache.padding
            outputs.append(step_states(convolved, z[:num_decode], gates[:num_decode], *states))
        if len(self._chunks):
            tokens, pieces, chunks = inputs[num_decode:], self._pieces, self._chunks
            convolved = convolve(
                tokens, newest, self._token_slots, self._offsets, weights.convolution, shape, cache.padding
            )
            keep_inputs(tokens, newest, pieces, chunks, shape)
            read = read_chunks(convolved, gates[num_decode:], recurrent, pieces, chunks, weights, shape)
            outputs.append(norm_outputs(read, z[num_decode:], weights.norm, weights.eps))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
