"""Gated DeltaNet in plain torch: `StateOps` of CPUs, and what kernels are checked against.

Decoding rows take one step of the recurrence together. Chunks of prompts take pieces of PIECE tokens at once: within a
piece the delta rule is a triangular system (arXiv:2412.06464, section 3.3). All sums are in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.attention.base import AttentionBatch
from toka_async.attention.states.cache import StateCache
from toka_async.attention.states.pieces import ChunkPieces, cut_chunks
from toka_async.kernels.delta.layer import DeltaShape, DeltaWeights

PIECE = 64  # tokens
NORM_EPS = 1e-6  # of the lengths of queries and keys


class TorchStateOps:
    def __init__(self, cache: StateCache) -> None:
        self._cache = cache
        self._slots = torch.empty(0, dtype=torch.int64)  # of decoding rows
        self._cut: ChunkPieces | None = None

    def plan(self, batch: AttentionBatch) -> None:
        self._slots = batch.slots[: batch.num_decode]
        lengths, states, self._cut = batch.query_lengths[batch.num_decode :], batch.states, None
        if states is not None and lengths.size:
            self._cut = cut_chunks(lengths, states, batch.num_decode, PIECE, self._cache.first_snapshot)

    def compute(self, layer: int, inputs: Tensor, z: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        shape, cut = self._cache.shape, self._cut
        beta, decay = compute_rates(gates, weights)
        output = torch.empty(len(inputs), shape.num_value_heads, shape.value_dim, device=inputs.device)
        num_decode = len(self._slots)
        if num_decode:
            rows = slice(0, num_decode)
            output[rows] = self._decode(layer, inputs[rows], beta[rows], decay[rows], weights)
        for first_piece, num_pieces, slot in [] if cut is None else cut.chunks.tolist():
            assert cut is not None
            state = self._cache.recurrent[slot, layer].float()
            newest = self._cache.inputs[slot, layer].T  # [channels, width - 1]
            for first, length, kept in cut.pieces[first_piece : first_piece + num_pieces].tolist():
                tokens = slice(first, first + length)
                seen = torch.cat([newest, inputs[tokens].T], dim=1)
                newest = seen[:, length:]
                convolved = convolve(seen.unfold(1, shape.width, 1).transpose(0, 1), weights.convolution)
                query, key, value = split_heads(convolved, shape)
                output[tokens], state = compute_piece(query, key, value, beta[tokens], decay[tokens], state)
                if kept >= 0:
                    self._keep(layer, kept, state, newest)
            self._keep(layer, slot, state, newest)
        return norm_gated(output, z.reshape(output.shape), weights).flatten(1)

    def _decode(self, layer: int, inputs: Tensor, beta: Tensor, decay: Tensor, weights: DeltaWeights) -> Tensor:
        """Takes one token of each row, [n, channels]. Returns [n, value heads, value_dim]."""
        cache, slots = self._cache, self._slots
        seen = torch.cat([cache.inputs[slots, layer], inputs[:, None]], dim=1)
        query, key, value = split_heads(convolve(seen.mT, weights.convolution), cache.shape)
        state = cache.recurrent[slots, layer].float() * decay.exp()[..., None, None]
        learned = (value - (key[:, :, None] @ state)[:, :, 0]) * beta[..., None]
        state += key[..., None] * learned[:, :, None]
        cache.recurrent[slots, layer] = state.to(cache.recurrent.dtype)
        cache.inputs[slots, layer] = seen[:, 1:]
        return (query[:, :, None] @ state)[:, :, 0]

    def _keep(self, layer: int, number: int, state: Tensor, newest: Tensor) -> None:
        self._cache.recurrent[number, layer] = state
        self._cache.inputs[number, layer] = newest.T


def compute_rates(gates: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """Computes beta and g, float32 [t, value heads], from [t, 2 * value heads]."""
    b, a = gates.chunk(2, dim=1)
    beta = torch.sigmoid(b).float()
    return beta, -weights.log_decay.exp() * F.softplus(a.float() + weights.time_bias)


def convolve(seen: Tensor, convolution: Tensor) -> Tensor:
    """Sums each channel's newest inputs [n, channels, width] by weight: [n, channels], after SiLU."""
    return F.silu((seen * convolution).sum(-1))


def split_heads(convolved: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries and keys of every value head, of length 1, and values: float32 [n, value heads, dim]."""
    query, key, value = torch.split(convolved.float(), [shape.num_keys, shape.num_keys, shape.num_values], dim=1)
    heads = []
    for each in (query, key):
        each = each.view(-1, shape.num_key_heads, shape.key_dim)
        each = each * torch.rsqrt(each.square().sum(-1, keepdim=True) + NORM_EPS)
        heads.append(each.repeat_interleave(shape.num_value_heads // shape.num_key_heads, dim=1))
    return heads[0] * shape.key_dim**-0.5, heads[1], value.view(-1, shape.num_value_heads, shape.value_dim)


def compute_piece(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes tokens [t, value heads, dim] of one sequence at once; beta, decay: [t, value heads].

    Returns what they read from the states, [t, value heads, value_dim], and the state behind them.
    """
    query, key, value = (each.transpose(0, 1) for each in (query, key, value))  # [heads, t, dim]
    beta, total = beta.T[..., None], decay.T.cumsum(1)[..., None]  # [heads, t, 1]
    # What remains at token i of what token j learned; never above 1, so nothing overflows.
    remains = (total - total.mT).tril().exp().tril()
    system = (beta * key) @ key.mT * remains
    known = torch.cat([beta * value, beta * total.exp() * key], dim=-1)
    learned, reads = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True).split(
        [value.shape[-1], key.shape[-1]], dim=-1
    )
    learned = learned - reads @ state
    output = (query * total.exp()) @ state + (query @ key.mT * remains) @ learned
    last = total[:, -1:]
    state = state * last.exp() + (key * (last - total).exp()).mT @ learned
    return output.transpose(0, 1), state


def norm_gated(output: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """Norms each head's output, float32 [t, value heads, value_dim], and gates it with z, in z's dtype."""
    normed = output * torch.rsqrt(output.square().mean(-1, keepdim=True) + weights.eps)
    return ((weights.norm * normed.to(z.dtype)) * F.silu(z.float())).to(z.dtype)
