"""The experts of so few tokens that most experts have one: each token's experts are read straight, in no order.

Reading the weights takes all the time, and threads multiply. Weights of 8-bit floats are read as such, and multiplied
with x as it is. Knows matrices by their shapes only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.activation import activate
from toka_async.kernels.experts.grouped import BLOCK
from toka_async.kernels.experts.routing import Routes
from toka_async.kernels.experts.sums import GatedValues
from toka_async.kernels.launches.pdl import can_follow, follow
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power

_GATED_COLUMNS = 4  # of a program, each of which is a row of both matrices
_COLUMNS = 4
_DEPTH = 512  # inputs at a time
_NUM_WARPS = 4


def multiply_gated(
    x: Tensor,
    weight: Tensor,
    routes: Routes,
    first: int,
    activation: str,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """[t, k] and each token's matrices of [experts, 2 * inner, k] to [t * top_k, inner].

    The rank has the experts from `first` on; what others compute stays unset. scales: of weights in E4M3, float32
    [experts, 2 * inner], or [experts, 2 * inner / BLOCK, k / BLOCK]. bias: [experts, 2 * inner].
    """
    (num_tokens, k), (num_own, outputs, _) = x.shape, weight.shape
    top_k, inner = routes.ids.shape[1], outputs // 2
    output = x.new_empty(num_tokens * top_k, inner)
    pdl = can_follow(x)
    _multiply_gated[(divide_up(inner, _GATED_COLUMNS), num_tokens * top_k)](
        x,
        weight,
        scales,
        bias,
        routes.ids,
        output,
        by_block=scales is not None and scales.ndim == 3,
        group=BLOCK,
        first=first,
        num_own=num_own,
        top_k=top_k,
        inner=inner,
        k=k,
        activation=activation,
        columns=_GATED_COLUMNS,
        depth=min(_DEPTH, round_to_power(k)),
        pdl=pdl,
        num_warps=_NUM_WARPS,
        launch_pdl=pdl,
    )
    return output


def add_products(
    x: Tensor,
    weight: Tensor,
    routes: Routes,
    first: int,
    output: Tensor,
    adds: bool,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    of_all: GatedValues | None = None,
) -> None:
    """Sums a token's products [n] by its shares into the output [t, n], or adds the sum to it.

    x: [t * top_k, k], of each pair; weight: [experts, n, k]. scales, bias: as of `multiply_gated`. of_all: what is
    added for each token.
    """
    (num_tokens, n), (num_own, _, k) = output.shape, weight.shape
    pdl = can_follow(output)
    _add_products[(divide_up(n, _COLUMNS), num_tokens)](
        x,
        weight,
        scales,
        bias,
        routes.ids,
        routes.shares,
        *(of_all or (None, None)),
        output,
        by_block=scales is not None and scales.ndim == 3,
        group=BLOCK,
        first=first,
        num_own=num_own,
        top_k=routes.ids.shape[1],
        n=n,
        k=k,
        adds=adds,
        columns=_COLUMNS,
        depth=min(_DEPTH, round_to_power(k)),
        pdl=pdl,
        num_warps=_NUM_WARPS,
        launch_pdl=pdl,
    )


@launch_quickly
@triton.jit
def _multiply_gated(
    x_at,
    weight_at,
    scales_at,
    bias_at,
    ids_at,
    output_at,
    by_block: tl.constexpr,
    group: tl.constexpr,
    first: tl.constexpr,
    num_own: tl.constexpr,
    top_k: tl.constexpr,
    inner: tl.constexpr,
    k: tl.constexpr,
    activation: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program computes `columns` outputs of one pair."""
    follow(pdl)
    pair = tl.program_id(1)
    expert = tl.load(ids_at + pair) - first
    if (expert >= 0) & (expert < num_own):
        # A gate's row and its up row side by side.
        number = tl.arange(0, 2 * columns)
        column = tl.program_id(0) * columns + number // 2
        source = tl.where(column < inner, column, 0) + number % 2 * inner
        row = expert.to(tl.int64) * 2 * inner + source
        weights_at = weight_at + row[:, None] * k
        inputs = tl.zeros_like(source)[:, None] + tl.arange(0, depth)[None, :]
        token_at = x_at + (pair // top_k).to(tl.int64) * k
        products = tl.zeros([2 * columns, depth], tl.float32)
        for begin in range(0, k, depth):
            is_input = inputs < k - begin
            part_x = tl.load(token_at + begin + inputs, mask=is_input, other=0.0)
            part_w = tl.load(weights_at + begin + inputs, mask=is_input, other=0.0)
            part_w = part_w.to(tl.float32)
            if by_block:
                blocks = (row // group * (k // group))[:, None] + (begin + inputs) // group
                part_w *= tl.load(scales_at + blocks, mask=is_input, other=0.0)
            products += part_w * part_x.to(tl.float32)
        result = tl.sum(products, 1)
        if scales_at is not None and not by_block:
            result *= tl.load(scales_at + row)
        if bias_at is not None:
            result += tl.load(bias_at + row).to(tl.float32)
        gate, up = result.reshape(columns, 2).split()
        column = tl.program_id(0) * columns + tl.arange(0, columns)
        result = activate(gate, up, activation).to(output_at.dtype.element_ty)
        tl.store(output_at + pair.to(tl.int64) * inner + column, result, mask=column < inner)


@launch_quickly
@triton.jit
def _add_products(
    x_at,
    weight_at,
    scales_at,
    bias_at,
    ids_at,
    shares_at,
    of_all_at,
    gates_at,
    output_at,
    by_block: tl.constexpr,
    group: tl.constexpr,
    first: tl.constexpr,
    num_own: tl.constexpr,
    top_k: tl.constexpr,
    n: tl.constexpr,
    k: tl.constexpr,
    adds: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program computes `columns` outputs of one token."""
    follow(pdl)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    source = tl.where(column < n, column, 0)
    inputs = tl.zeros_like(source)[:, None] + tl.arange(0, depth)[None, :]
    products = tl.zeros([columns, depth], tl.float32)
    biases = tl.zeros([columns], tl.float32)
    for rank in tl.static_range(top_k):
        pair = token * top_k + rank
        expert = tl.load(ids_at + pair) - first
        is_own = (expert >= 0) & (expert < num_own)
        share = tl.load(shares_at + pair)
        row = tl.where(is_own, expert, 0).to(tl.int64) * n + source
        weights_at = weight_at + row[:, None] * k
        if bias_at is not None:
            biases += share * tl.load(bias_at + row, mask=is_own & (column < n), other=0.0).to(tl.float32)
        factor = share
        if scales_at is not None and not by_block:
            factor = (share * tl.load(scales_at + row))[:, None]
        for begin in range(0, k, depth):
            is_input = (inputs < k - begin) & is_own
            part_x = tl.load(x_at + pair * k + begin + inputs, mask=is_input, other=0.0)
            part_w = tl.load(weights_at + begin + inputs, mask=is_input, other=0.0)
            part_w = part_w.to(tl.float32)
            if by_block:
                blocks = (row // group * (k // group))[:, None] + (begin + inputs) // group
                part_w *= tl.load(scales_at + blocks, mask=is_input, other=0.0)
            products += part_w * (part_x.to(tl.float32) * factor)
    result = tl.sum(products, 1) + biases
    if of_all_at is not None:
        values = tl.load(of_all_at + token * n + column, mask=column < n, other=0.0).to(tl.float32)
        result += tl.load(gates_at + token) * values
    output_at += token * n + column
    if adds:
        result += tl.load(output_at, mask=column < n, other=0.0).to(tl.float32)
    tl.store(output_at, result.to(output_at.dtype.element_ty), mask=column < n)
