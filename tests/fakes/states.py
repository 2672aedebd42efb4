"""Steps of layers with a recurrent state, and the recurrence token by token to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.attention.base import AttentionBatch, ChunkStates
from toka_async.attention.states.cache import StateCache
from toka_async.kernels.delta.layer import DeltaShape, DeltaWeights

SHAPE = DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=24, width=4)
MAX_SEQS = 6


def make_weights(shape: DeltaShape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> DeltaWeights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    heads = shape.num_value_heads
    return DeltaWeights(
        convolution=(0.5 * normal(shape.num_channels, shape.width)).to(device, dtype),
        log_decay=(0.5 * normal(heads) - 1).to(device),
        time_bias=normal(heads).to(device),
        norm=(1 + 0.2 * normal(shape.value_dim)).to(device, dtype),
        eps=1e-6,
    )


def make_cache(
    shape: DeltaShape,
    dtype: torch.dtype,
    device: torch.device,
    num_layers: int = 2,
    num_snapshots: int = 3,
    stored: torch.dtype = torch.float32,
) -> StateCache:
    """A cache whose states are random, that of padding included."""
    cache = StateCache(shape, num_layers, MAX_SEQS, num_snapshots, dtype, device, stored=stored)
    generator = torch.Generator().manual_seed(5)
    cache.recurrent.copy_(torch.randn(cache.recurrent.shape, generator=generator))
    cache.inputs.copy_(torch.randn(cache.inputs.shape, generator=generator))
    return cache


def make_batch(
    decode: Sequence[int],
    chunks: Sequence[tuple[int, int]],
    saves: Sequence[tuple[int, int, int]],
    device: torch.device,
) -> AttentionBatch:
    """decode: slots. chunks: slot and tokens of each. saves: see `ChunkStates`. Attention finds nothing in it."""
    lengths = np.asarray([1] * len(decode) + [length for _, length in chunks], np.int32)
    slots = [*decode, *(slot for slot, _ in chunks)]
    return AttentionBatch(
        num_decode=len(decode),
        query_lengths=lengths,
        context_lengths=lengths,
        contexts=torch.from_numpy(lengths).to(device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        page_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        write_indices=torch.zeros(int(lengths.sum()), dtype=torch.int64, device=device),
        states=ChunkStates(np.asarray([slot for slot, _ in chunks], np.int32), tuple(saves)),
    )


def make_inputs(
    shape: DeltaShape, num_tokens: int, dtype: torch.dtype, device: torch.device, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Projections and gates of tokens."""
    generator = torch.Generator().manual_seed(seed)
    width = shape.num_channels + shape.num_values
    projected = torch.randn(num_tokens, width, generator=generator)
    gates = torch.randn(num_tokens, 2 * shape.num_value_heads, generator=generator)
    return projected.to(device, dtype), gates.to(device, dtype)


def compute_by_token(
    cache: StateCache, layer: int, batch: AttentionBatch, projected: Tensor, gates: Tensor, weights: DeltaWeights
) -> Tensor:
    """By the definition of the layer, in float64; the cache's states change as they should."""
    shape = cache.shape
    slots, outputs, token = batch.slots.tolist(), [], 0
    for row, length in enumerate(batch.query_lengths.tolist()):
        state = cache.recurrent[slots[row], layer].double()
        newest = cache.inputs[slots[row], layer].T.double()
        for number in range(1, length + 1):
            x, z = projected[token].double().tensor_split([shape.num_channels])
            seen = torch.cat([newest, x[:, None]], 1)
            newest = seen[:, 1:]
            mixed = F.silu((seen * weights.convolution.double()).sum(1))
            query, key, value = mixed.tensor_split([shape.num_keys, 2 * shape.num_keys])
            query, key = (_prepare(each, shape) for each in (query, key))
            value = value.view(shape.num_value_heads, -1)
            b, a = gates[token].double().chunk(2)
            decay = (-weights.log_decay.double().exp() * F.softplus(a + weights.time_bias)).exp()
            state = state * decay[:, None, None]
            learned = torch.sigmoid(b)[:, None] * (value - torch.einsum("hk,hkv->hv", key, state))
            state = state + key[:, :, None] * learned[:, None, :]
            read = torch.einsum("hk,hkv->hv", query, state) * shape.key_dim**-0.5
            normed = read / (read.square().mean(1, keepdim=True) + weights.eps).sqrt() * weights.norm.double()
            outputs.append(normed.flatten() * F.silu(z))
            token += 1
            assert batch.states is not None
            place = (row - batch.num_decode, number)
            kept = [cache.first_snapshot + each for chunk, end, each in batch.states.saves if (chunk, end) == place]
            for target in (*kept, *([slots[row]] if number == length else [])):
                cache.recurrent[target, layer] = state.float()
                cache.inputs[target, layer] = newest.T.to(cache.inputs.dtype)
    return torch.stack(outputs)


def _prepare(each: Tensor, shape: DeltaShape) -> Tensor:
    heads = each.view(shape.num_key_heads, -1)
    heads = heads / (heads.square().sum(1, keepdim=True) + 1e-6).sqrt()
    return heads.repeat_interleave(shape.num_value_heads // shape.num_key_heads, 0)


def split_z(shape: DeltaShape, projected: Tensor) -> tuple[Tensor, Tensor]:
    """What is convolved, and the output's gate."""
    return projected[:, : shape.num_channels], projected[:, shape.num_channels :]
