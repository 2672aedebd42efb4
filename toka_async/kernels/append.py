"""Everything between the fused query-key-value matrix and attention, in one pass over its output.

Norms and rotates queries and keys, and writes keys and values into their pages. Knows no rows and no page table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements of a program: enough for wide accesses, few enough that one token makes several programs


def append(
    heads: Tensor,
    rotation: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    write_indices: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """Writes keys and values to the cache; returns the rotated queries [tokens, heads, dim].

    heads [tokens, heads + 2 kv_heads, dim], contiguous. rotation: cos and signed sin (the first half of the sin
    negated), [tokens, 1, dim] each; dimension i pairs with i + dim / 2. keys, values: one layer of the cache
    [pages, kv_heads, page_size, dim]. write_indices int64 [tokens]: page * page_size + offset.
    norm_weight [heads + kv_heads, dim]: RMSNorm of each query and key head first (arXiv:1910.07467).
    """
    num_tokens, num_all, dim = heads.shape
    kv_heads, page_size = keys.shape[1:3]
    num_heads = num_all - 2 * kv_heads
    cos, sin = rotation
    assert heads.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert dim % 2 == 0
    query = torch.empty((num_tokens, num_heads, dim), dtype=heads.dtype, device=heads.device)
    if not num_tokens:
        return query
    half_pad = triton.next_power_of_2(dim // 2)
    block = min(max(1, TILE // (2 * half_pad)), triton.next_power_of_2(num_all))
    _append[num_tokens, triton.cdiv(num_all, block)](
        heads,
        cos,
        sin,
        query,
        keys,
        values,
        write_indices,
        norm_weight,
        norm_eps,
        NORM=norm_weight is not None,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        HALF_PAD=half_pad,
        PAGE=page_size,
        BLOCK=block,
        num_warps=2 if block * half_pad >= 256 else 1,
    )
    return query


@triton.jit
def _append(
    heads,
    cos,
    sin,
    query,
    keys,
    values,
    write_indices,
    norm_weight,
    norm_eps,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, HALF_PAD)
    inside = (head < ALL)[:, None] & (dims < HALF)[None, :]
    source = heads + (token * ALL + head)[:, None] * DIM + dims[None, :]
    dtype = heads.dtype.element_ty
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    rotated = head < HEADS + KV_HEADS
    turn_low, turn_high = low, high
    if NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        factor = tl.rsqrt(squares / DIM + norm_eps)[:, None]
        weighted = rotated[:, None] & (dims < HALF)[None, :]
        weights = norm_weight + head[:, None] * DIM + dims[None, :]
        weight_low = tl.load(weights, mask=weighted, other=0.0).to(tl.float32)
        weight_high = tl.load(weights + HALF, mask=weighted, other=0.0).to(tl.float32)
        # Rounded before and after the weight, as a model in this dtype computes it.
        turn_low = ((low * factor).to(dtype).to(tl.float32) * weight_low).to(dtype).to(tl.float32)
        turn_high = ((high * factor).to(dtype).to(tl.float32) * weight_high).to(dtype).to(tl.float32)
    angle = token * DIM + dims
    cos_low = tl.load(cos + angle, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + angle + HALF, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angle, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + angle + HALF, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    new_low = (turn_low * cos_low + turn_high * sin_low).to(dtype)
    new_high = (turn_high * cos_high + turn_low * sin_high).to(dtype)

    is_query = (head < HEADS)[:, None] & (dims < HALF)[None, :]
    target = query + (token * HEADS + head)[:, None] * DIM + dims[None, :]
    tl.store(target, new_low, mask=is_query)
    tl.store(target + HALF, new_high, mask=is_query)

    index = tl.load(write_indices + token)
    page, offset = index // PAGE, index % PAGE
    key_head = head - HEADS
    place = ((page * KV_HEADS + key_head) * PAGE + offset)[:, None] * DIM + dims[None, :]
    is_key = ((head >= HEADS) & rotated)[:, None] & (dims < HALF)[None, :]
    tl.store(keys + place, new_low, mask=is_key)
    tl.store(keys + place + HALF, new_high, mask=is_key)
    place -= KV_HEADS * PAGE * DIM
    is_value = inside & (head >= HEADS + KV_HEADS)[:, None]
    tl.store(values + place, low.to(dtype), mask=is_value)
    tl.store(values + place + HALF, high.to(dtype), mask=is_value)
