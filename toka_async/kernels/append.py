"""Does all work between the query-key-value matrix and attention in one pass over the matrix' output.

Norms and rotates queries and keys, and writes keys and values into their pages. Knows no rows and no page table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.launches.pdl import can_follow, follow
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power
from toka_async.kernels.stored import to_stored

# Heads and elements of a program: enough for wide accesses, few enough to give one token several programs.
HEADS = 16
TILE = 2048


def append(
    heads: Tensor,
    rotation: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    write_indices: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
    writes: bool = True,
) -> Tensor:
    """Writes keys and values to the cache; returns the rotated queries [tokens, heads, dim].

    heads [tokens, heads + 2 kv_heads, dim], a token's contiguous. rotation: cos and signed sin (the first half of the
    sin negated), [tokens, 1, turned] each: of the first dimensions, which turn, i pairs with i + turned / 2. keys,
    values: one layer of the cache [pages, kv_heads, page_size, dim]. write_indices int64 [tokens]: page * page_size +
    offset.
    norm_weight [heads + kv_heads, dim]: RMSNorm of each query and key head first (see `QueryKeyNorm`). scales: if the
    cache stores E4M3, keys and values are divided by these, and saturate. writes: otherwise there are queries alone,
    heads and norm_weight [heads, dim], and nothing is written.
    """
    num_tokens, num_all, dim = heads.shape
    kv_heads, page_size = keys.shape[1] if writes else 0, keys.shape[2]
    num_heads = num_all - 2 * kv_heads
    cos, sin = rotation
    assert heads.stride()[1:] == (dim, 1)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert dim % 2 == 0
    query = torch.empty((num_tokens, num_heads, dim), dtype=heads.dtype, device=heads.device)
    if not num_tokens:
        return query
    half_pad, pdl = round_to_power(dim // 2), can_follow(heads)
    block = min(HEADS, max(1, TILE // (2 * half_pad)), round_to_power(num_all))
    _append[num_tokens, divide_up(num_all, block)](
        heads,
        heads.stride(0),
        cos,
        sin,
        query,
        keys,
        values,
        write_indices,
        norm_weight,
        norm_eps,
        1 / scales[0],
        1 / scales[1],
        has_norm=norm_weight is not None,
        num_heads=num_heads,
        kv_heads=kv_heads,
        half=dim // 2,
        turn=cos.shape[-1] // 2,
        half_pad=half_pad,
        page_size=page_size,
        block=block,
        pdl=pdl,
        num_warps=2 if block * half_pad >= 256 else 1,
        launch_pdl=pdl,
    )
    return query


@launch_quickly
@triton.jit(do_not_specialize_on_alignment=["write_indices"])
def _append(
    heads,
    stride,
    cos,
    sin,
    query,
    keys,
    values,
    write_indices,
    norm_weight,
    norm_eps,
    key_factor,
    value_factor,
    has_norm: tl.constexpr,
    num_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    turn: tl.constexpr,
    half_pad: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    follow(pdl)
    num_all: tl.constexpr = num_heads + 2 * kv_heads
    dim: tl.constexpr = 2 * half
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block + tl.arange(0, block)
    column = tl.arange(0, half_pad)
    # Dimensions in pairs: those that turn, then the others, which angles of 0 leave as they are.
    first, second = column, column + half
    if turn < half:
        first = tl.where(column < turn, column, column + turn)
        second = tl.where(column < turn, column + turn, column + half)
    inside = (head < num_all)[:, None] & (column < half)[None, :]
    source = heads + token * stride + head[:, None] * dim
    dtype = heads.dtype.element_ty
    low = tl.load(source + first[None, :], mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + second[None, :], mask=inside, other=0.0).to(tl.float32)
    rotated = head < num_heads + kv_heads
    turn_low, turn_high = low, high
    if has_norm:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        factor = tl.rsqrt(squares / dim + norm_eps)[:, None]
        weighted = rotated[:, None] & (column < half)[None, :]
        weights = norm_weight + head[:, None] * dim
        weight_low = tl.load(weights + first[None, :], mask=weighted, other=0.0).to(tl.float32)
        weight_high = tl.load(weights + second[None, :], mask=weighted, other=0.0).to(tl.float32)
        # Rounds before and after the weight, as a model in this dtype does; a float32 weight is after no rounding.
        inner: tl.constexpr = norm_weight.dtype.element_ty
        turn_low = ((low * factor).to(inner).to(tl.float32) * weight_low).to(dtype).to(tl.float32)
        turn_high = ((high * factor).to(inner).to(tl.float32) * weight_high).to(dtype).to(tl.float32)
    angle = token * 2 * turn + column
    cos_low = tl.load(cos + angle, mask=column < turn, other=1.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + angle + turn, mask=column < turn, other=1.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angle, mask=column < turn, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + angle + turn, mask=column < turn, other=0.0).to(tl.float32)[None, :]
    new_low = (turn_low * cos_low + turn_high * sin_low).to(dtype)
    new_high = (turn_high * cos_high + turn_low * sin_high).to(dtype)

    is_query = (head < num_heads)[:, None] & (column < half)[None, :]
    target = query + (token * num_heads + head)[:, None] * dim
    tl.store(target + first[None, :], new_low, mask=is_query)
    tl.store(target + second[None, :], new_high, mask=is_query)

    index = tl.load(write_indices + token)
    page, offset = index // page_size, index % page_size
    key_head = head - num_heads
    place = ((page * kv_heads + key_head) * page_size + offset)[:, None] * dim
    is_key = ((head >= num_heads) & rotated)[:, None] & (column < half)[None, :]
    stored: tl.constexpr = keys.dtype.element_ty
    tl.store(keys + place + first[None, :], to_stored(new_low, stored, key_factor), mask=is_key)
    tl.store(keys + place + second[None, :], to_stored(new_high, stored, key_factor), mask=is_key)
    place -= kv_heads * page_size * dim
    is_value = inside & (head >= num_heads + kv_heads)[:, None]
    tl.store(values + place + first[None, :], to_stored(low, stored, value_factor), mask=is_value)
    tl.store(values + place + second[None, :], to_stored(high, stored, value_factor), mask=is_value)
