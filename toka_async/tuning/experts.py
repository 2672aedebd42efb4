"""Chooses how mixtures of experts are computed, by numbers of tokens that choose all experts equally often."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import permutations

import torch
from msgspec.structs import asdict
from torch import Tensor

from toka_async.checkpoint.experts_spec import ExpertsFeedSpec
from toka_async.kernels.built import explain_unbuilt
from toka_async.kernels.experts.grouped import BLOCK, GroupedTile
from toka_async.kernels.experts.mixture import SCALED_TILES, STRAIGHT, TILES, ExpertKernels, ExpertPlan, choose_plan
from toka_async.kernels.experts.routing import Routes, route
from toka_async.kernels.experts.weights import ExpertWeights
from toka_async.kernels.fused import ExpertMixing
from toka_async.model.decoder import RankModel
from toka_async.model.experts_feed import ExpertsFeed
from toka_async.tuning.clock import time_launches
from toka_async.tuning.matrix_group import RowCounts
from toka_async.tuning.store import Facts
from toka_async.tuning.trial import CallClock, find_fastest

logger = logging.getLogger(__name__)

# Each is built for every shape of experts at a first start.
GROUPED_TILES = (
    *(tile for _, tile in TILES),
    GroupedTile(16, 64, 128, num_stages=4, num_warps=4),
    GroupedTile(32, 128, 64, num_stages=4, num_warps=4),
    GroupedTile(128, 128, 64, num_stages=3, num_warps=8),
    GroupedTile(128, 256, 64, num_stages=3, num_warps=8, joined=True),
    GroupedTile(128, 256, 64, num_stages=4, num_warps=8, joined=True),
)
SCALED_GROUPED_TILES = (
    *(tile for _, tile in SCALED_TILES),
    GroupedTile(128, 256, BLOCK, num_stages=3, num_warps=8, joined=True),  # wider than a block of scales
)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_NEAR = 4  # an expert's average rows and a tile's, at most so many times each other
_MANY = 64  # rows of an expert, on average, from which on its two products have tiles of their own
_LIBRARY = (9, 10)  # compute capabilities whose grouped product by torch needs no answer from the device
_MOST_LAYERS = 4  # that are measured in turn
_DTYPES = (torch.bfloat16, torch.float16)


class ExpertPlanChoice:
    """The `Choice` of a plan for up to each of `sizes` tokens.

    experts: of several layers, used in turn. Measuring allocates what a step of the most tokens does.
    """

    name = "experts"
    kind = list[ExpertPlan]

    def __init__(
        self,
        kernels: ExpertKernels,
        spec: ExpertsFeedSpec,
        experts: Sequence[ExpertWeights],
        dtype: torch.dtype,
        sizes: Sequence[int],
        clock: CallClock = time_launches,
    ) -> None:
        """dtype: of tokens."""
        self._kernels = kernels
        self._spec = spec
        self._experts = experts
        self._dtype = dtype
        self._sizes = sorted(sizes)
        self._clock = clock
        self._has_library = has_library(experts[0].down)

    def describe(self) -> Facts:
        down = self._experts[0].down
        return {
            "feed": asdict(self._spec),
            "down": list(down.shape),
            "dtype": [str(self._dtype), str(down.dtype)],
            "by_block": self._by_block,
            "sizes": self._sizes,
            "tiles": [repr(tile) for tile in self._list_tiles()],
            "apart_from": _MANY,
        }

    def admits(self, answer: Sequence[ExpertPlan]) -> bool:
        """Tells whether all plans can be used here. Building them is what a later start needs, too."""
        return len(answer) == len(self._sizes) and all(
            (plan in self._list_plans(size) or plan in self._list_mixed(size)) and self._is_built(plan)
            for size, plan in zip(self._sizes, answer, strict=True)
        )

    def measure(self) -> list[ExpertPlan]:
        """Measures the fastest plan for each size."""
        return [self._measure_size(size) for size in self._sizes]

    def use(self, answer: Sequence[ExpertPlan]) -> None:
        self._kernels.use(self._experts[0], self._sizes, answer)

    def _measure_size(self, size: int) -> ExpertPlan:
        x, routes = self._make_tokens(size)

        def find(plans: Sequence[ExpertPlan]) -> ExpertPlan:
            plans = [plans[0], *filter(self._is_built, plans[1:])]
            ways = [partial(self._compute, plan, routes) for plan in plans]
            return plans[find_fastest(ways, self._experts, [(x, torch.empty_like(x))], self._clock)]

        best = find(self._list_plans(size))
        alike = [plan for plan in self._list_mixed(size) if plan.gated == best.gated or plan.down == best.down]
        return find([best, *alike])

    def _list_plans(self, size: int) -> list[ExpertPlan]:
        """Lists the plans that may be the fastest for so many tokens; first the one that is not measured."""
        spec, num_pairs = self._spec, size * self._spec.top_k
        average = num_pairs / spec.num_experts
        plans = [choose_plan(num_pairs, spec.num_experts, self._experts[0].down.dtype)]
        if num_pairs <= 2 * spec.num_experts:
            plans.append(STRAIGHT)
        for tile in self._list_tiles():
            if tile.rows <= _NEAR * max(average, 16) and _NEAR * tile.rows >= min(average, 128):
                plans.append(ExpertPlan(tile, tile))
                if self._has_library:
                    plans.append(ExpertPlan(tile, None))
        return list(dict.fromkeys(plans))

    def _list_mixed(self, size: int) -> list[ExpertPlan]:
        """Lists the plans whose products have different tiles, where these take enough of the time."""
        if size * self._spec.top_k < _MANY * self._spec.num_experts:
            return []
        tiles = dict.fromkeys(plan.gated for plan in self._list_plans(size) if plan.gated is not None)
        return [ExpertPlan(*pair) for pair in permutations(tiles, 2)]

    @property
    def _by_block(self) -> bool:
        scales = self._experts[0].down_scales
        return scales is not None and scales.ndim == 3

    def _list_tiles(self) -> Sequence[GroupedTile]:
        if self._experts[0].down_scales is None:
            return GROUPED_TILES
        if self._by_block:
            return [tile for tile in SCALED_GROUPED_TILES if tile.width <= BLOCK]
        return SCALED_GROUPED_TILES

    def _compute(self, plan: ExpertPlan, routes: Routes, x: Tensor, experts: ExpertWeights, output: Tensor) -> None:
        self._kernels.compute(plan, x, routes, experts, output, adds=True)

    def _make_tokens(self, size: int) -> tuple[Tensor, Routes]:
        down, spec = self._experts[0].down, self._spec
        x = torch.randn(size, down.shape[1], device=down.device, dtype=self._dtype)
        logits = torch.randn(size, spec.num_experts, device=down.device, dtype=self._dtype)
        return x, route(logits, spec.top_k, spec.renormalizes)

    def _is_built(self, plan: ExpertPlan) -> bool:
        """Builds the kernels. Returns False if that fails, such as for want of shared memory."""
        x, routes = self._make_tokens(1)
        reason = explain_unbuilt(lambda: self._compute(plan, routes, x, self._experts[0], torch.empty_like(x)))
        if reason:
            logger.info("experts: %s is not used here: %s", plan, reason)
        return not reason


def has_library(weight: Tensor) -> bool:
    """Tells whether torch's grouped product can be captured in graphs, for weights [experts, n, k]."""
    if weight.dtype != torch.bfloat16 or not weight.is_cuda:
        return False
    _, n, k = weight.shape
    return torch.cuda.get_device_capability(weight.device)[0] in _LIBRARY and n % 8 == k % 8 == 0


def list_expert_choices(
    kernels: ExpertMixing | None, decoder: RankModel, counts: RowCounts
) -> Iterator[ExpertPlanChoice]:
    """Yields a choice for each different shape of a decoder's experts."""
    if not isinstance(kernels, ExpertKernels):
        return
    feeds = [layer.feed for layer in decoder.list_layers() if isinstance(layer.feed, ExpertsFeed)]
    for spec in dict.fromkeys(feed.spec for feed in feeds):
        alike = [feed.weights for feed in feeds if feed.spec == spec][:_MOST_LAYERS]
        dtype = feeds[0].dtype
        if dtype in _DTYPES:
            sizes = counts.exact or [*(size for size in _SIZES if size < counts.most), counts.most]
            yield ExpertPlanChoice(kernels, spec, alike, dtype, sizes)
