"""Sums what a token's experts have computed, by its shares and in the order of its experts. Knows no matrices."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.experts.routing import Placement, Routes
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power

_BLOCK = 1024

GatedValues = tuple[Tensor, Tensor]  # values [t, n], and the share in float32 [t] with which each token's count


def add_by_token(
    values: Tensor,
    routes: Routes,
    placement: Placement,
    output: Tensor,
    adds: bool,
    bias: Tensor | None = None,
    first: int = 0,
    of_all: GatedValues | None = None,
) -> None:
    """Sums [r, n], a row for each place, in float32 into the output [t, n], or adds the sum to it.

    bias: [experts, n], what an expert adds to its values; of the rank's experts, from number `first` on. of_all: what
    is added for each token.
    """
    (num_tokens, n), top_k = output.shape, routes.ids.shape[1]
    block = min(_BLOCK, round_to_power(n))
    _add_by_token[(num_tokens, divide_up(n, block))](
        values,
        placement.places,
        routes.ids,
        routes.shares,
        bias,
        *(of_all or (None, None)),
        output,
        first=first,
        n=n,
        top_k=top_k,
        adds=adds,
        block=block,
        num_warps=4,
    )


@launch_quickly
@triton.jit
def _add_by_token(
    values_at,
    places_at,
    ids_at,
    shares_at,
    bias_at,
    of_all_at,
    gates_at,
    output_at,
    first: tl.constexpr,
    n: tl.constexpr,
    top_k: tl.constexpr,
    adds: tl.constexpr,
    block: tl.constexpr,
):
    """One program computes `block` outputs of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_column = column < n
    output_at += token * n + column
    total = tl.zeros([block], tl.float32)
    for rank in tl.static_range(top_k):
        place = tl.load(places_at + token * top_k + rank).to(tl.int64)
        share = tl.load(shares_at + token * top_k + rank)
        values = tl.load(values_at + place * n + column, mask=is_column & (place >= 0), other=0.0).to(tl.float32)
        if bias_at is not None:
            row_at = bias_at + (tl.load(ids_at + token * top_k + rank).to(tl.int64) - first) * n
            values += tl.load(row_at + column, mask=is_column & (place >= 0), other=0.0).to(tl.float32)
        total += share * values
    if of_all_at is not None:
        values = tl.load(of_all_at + token * n + column, mask=is_column, other=0.0).to(tl.float32)
        total += tl.load(gates_at + token) * values
    if adds:
        total += tl.load(output_at, mask=is_column, other=0.0).to(tl.float32)
    tl.store(output_at, total.to(output_at.dtype.element_ty), mask=is_column)
