"""Mixtures of experts on a GPU: routes, and the products of all chosen experts, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.kernels.by_rows import ByRows
from toka_async.kernels.experts import few_tokens
from toka_async.kernels.experts.gate import open_gate
from toka_async.kernels.experts.grouped import BLOCK, STORE, GroupedProducts, GroupedTile, GroupScales
from toka_async.kernels.experts.routing import Routes, place, route
from toka_async.kernels.experts.sums import GatedValues, add_by_token
from toka_async.kernels.experts.weights import ExpertOfAll, ExpertWeights
from toka_async.kernels.fp8.quantize import FP8, quantize


@dataclass(slots=True, frozen=True)
class ExpertPlan:
    """How the experts of a step are computed: the tiles of both products.

    gated: None: each token's experts are read straight. down: None: by torch's grouped product, where it has one.
    """

    gated: GroupedTile | None
    down: GroupedTile | None


STRAIGHT = ExpertPlan(None, None)
# By the average number of an expert's rows. Each tile takes at most 99 KiB where multiprocessors have no more.
TILES = (
    (24, GroupedTile(16, 128, 64, num_stages=4, num_warps=4)),
    (96, GroupedTile(64, 128, 64, num_stages=4, num_warps=4)),
    (0, GroupedTile(128, 256, 64, num_stages=3, num_warps=8)),
)
INVARIANT = TILES[1][1]  # for any number of rows, so that all of a row's products are the same bits
_EXACT = GroupedTile(16, 64, 32, num_stages=2, num_warps=4)  # of float32 values
# Of 8-bit floats, whose blocks of scales are as wide and as deep as a tile.
SCALED_TILES = (
    (24, GroupedTile(16, 128, BLOCK, num_stages=4, num_warps=4)),
    (96, GroupedTile(64, 128, BLOCK, num_stages=3, num_warps=4)),
    (0, GroupedTile(128, 128, BLOCK, num_stages=3, num_warps=8)),
)
SCALED_INVARIANT = SCALED_TILES[1][1]


def choose_plan(num_pairs: int, num_experts: int, dtype: torch.dtype) -> ExpertPlan:
    """Chooses a plan where none has been measured. dtype: of the weights."""
    if 2 * num_pairs <= num_experts:  # mostly one token an expert
        return STRAIGHT
    if dtype == torch.float32:
        return ExpertPlan(_EXACT, _EXACT)
    tiles = SCALED_TILES if dtype == FP8 else TILES
    tile = next((tile for most, tile in tiles if num_pairs <= most * num_experts), tiles[-1][1])
    return ExpertPlan(tile, tile)


def choose_invariant_plan(dtype: torch.dtype) -> ExpertPlan:
    """Chooses the plan of any number of tokens with which a token's sum does not depend on the others."""
    tile = {torch.float32: _EXACT, FP8: SCALED_INVARIANT}.get(dtype, INVARIANT)
    return ExpertPlan(tile, tile)


class ExpertKernels:
    """`ExpertMixing` by our kernels, for contiguous tensors on one GPU."""

    def __init__(self, products: GroupedProducts | None = None, invariant: bool = False) -> None:
        """invariant: a token's sum is the same bits, whatever other tokens there are."""
        self._products = products or GroupedProducts()
        self._invariant = invariant
        self._chosen: dict[tuple[object, ...], ByRows[ExpertPlan]] = {}

    def use(self, experts: ExpertWeights, sizes: Sequence[int], plans: Sequence[ExpertPlan]) -> None:
        """From now on the i-th plan computes up to sizes[i] tokens, in ascending order."""
        self._chosen[_describe(experts)] = ByRows(list(sizes), list(plans))

    def mix(
        self,
        x: Tensor,
        logits: Tensor,
        experts: ExpertWeights,
        residual: Tensor | None,
        of_all: ExpertOfAll | None = None,
    ) -> Tensor:
        output = torch.empty_like(x) if residual is None else residual
        if not len(x):
            return output
        plan = self._find_plan(len(x), logits.shape[1], experts)
        routes = route(logits, experts.top_k, experts.renormalizes, experts.loads, experts.counted)
        gated = None if of_all is None else (of_all.compute(), open_gate(x, of_all.gate))
        self.compute(plan, x, routes, experts, output, residual is not None, gated)
        return output

    def compute(
        self,
        plan: ExpertPlan,
        x: Tensor,
        routes: Routes,
        experts: ExpertWeights,
        output: Tensor,
        adds: bool,
        of_all: GatedValues | None = None,
    ) -> None:
        """Computes the mixture of routed tokens [t, hidden] into the output [t, hidden], or adds it there."""
        gate_up, down, first = experts.gate_up, experts.down, experts.first
        if plan.gated is None:
            of_gate, of_down = (experts.gate_up_scales, experts.gate_up_bias), (experts.down_scales, experts.down_bias)
            inner = few_tokens.multiply_gated(x, gate_up, routes, first, experts.activation, *of_gate)
            few_tokens.add_products(inner, down, routes, first, output, adds, *of_down, of_all)
            return
        placement = place(routes, first, len(gate_up))
        pairs, ends = placement.pairs, placement.ends
        inner = x.new_empty(len(pairs), down.shape[2])
        x, scales = _quantize(x, experts.gate_up_scales)
        finish, bias = experts.activation, experts.gate_up_bias
        self._products.multiply(x, gate_up, ends, inner, finish, plan.gated, pairs, experts.top_k, scales, bias)
        if plan.down is None:
            products = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
        else:
            products = output.new_empty(len(pairs), output.shape[1])
            inner, scales = _quantize(inner, experts.down_scales)
            self._products.multiply(inner, down, ends, products, STORE, plan.down, scales=scales)
        add_by_token(products, routes, placement, output, adds, experts.down_bias, first, of_all)

    def _find_plan(self, num_tokens: int, num_experts: int, experts: ExpertWeights) -> ExpertPlan:
        if self._invariant:
            return choose_invariant_plan(experts.down.dtype)
        chosen = self._chosen.get(_describe(experts))
        plan = None if chosen is None else chosen.find(num_tokens)
        return plan or choose_plan(num_tokens * experts.top_k, num_experts, experts.down.dtype)


def _quantize(x: Tensor, weight_scales: Tensor | None) -> tuple[Tensor, GroupScales | None]:
    """Returns x as a weight with such scales takes it, and the scales of both."""
    if weight_scales is None:
        return x, None
    values, scales = quantize(x, by_block=weight_scales.ndim == 3)
    return values, GroupScales(scales, weight_scales)


def _describe(experts: ExpertWeights) -> tuple[object, ...]:
    return *experts.down.shape, experts.down.dtype, experts.top_k, experts.activation
