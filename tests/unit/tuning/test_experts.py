from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from tests.cases.experts import make_experts
from tests.cases.models import make_checkpoint
from toka_async.checkpoint.experts_spec import ExpertNames, ExpertsFeedSpec
from toka_async.checkpoint.spec import read_spec
from toka_async.kernels.experts.grouped import GroupedTile
from toka_async.kernels.experts.mixture import STRAIGHT, ExpertKernels, ExpertPlan, choose_plan
from toka_async.model.weights import build_decoder
from toka_async.tuning import experts as module
from toka_async.tuning.experts import GROUPED_TILES, ExpertPlanChoice, has_library, list_expert_choices
from toka_async.tuning.matrix_group import RowCounts
from toka_async.tuning.store import TuningCache

BF16, CPU = torch.bfloat16, torch.device("cpu")
SPEC = ExpertsFeedSpec(inner=16, activation="silu", num_experts=4, top_k=1, renormalizes=True, names=ExpertNames())
SMALL, OTHER = GroupedTile(16, 32, 16, 2, 4), GroupedTile(32, 32, 16, 2, 4)


class Plans:
    """Records the plan of each call, which takes as long as `takes` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: Callable[[ExpertPlan, int], float]) -> None:
        self.used: tuple[ExpertPlan, int] = STRAIGHT, 0
        self.broken: GroupedTile | None = None
        self._takes = takes
        monkeypatch.setattr(ExpertKernels, "compute", lambda _, *arguments, **__: self._note(*arguments))

    def _note(self, plan: ExpertPlan, x: Tensor, *_: object) -> None:
        if plan.gated is not None and plan.gated == self.broken:
            raise OutOfResources(300_000, 100_000, "shared memory")
        self.used = plan, len(x)

    def clock(self, call: Callable[[], None], num_calls: int) -> float:
        call()
        return num_calls * self._takes(*self.used)


def choice_of(kernels: ExpertKernels, plans: Plans, sizes: list[int]) -> ExpertPlanChoice:
    return ExpertPlanChoice(kernels, SPEC, [make_experts(4, 1, 16, 16, BF16, CPU)] * 2, BF16, sizes, plans.clock)


def test_each_size_has_the_fastest_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUPED_TILES", (SMALL, OTHER))
    fast = {1: STRAIGHT, 6: ExpertPlan(OTHER, OTHER), 40: ExpertPlan(SMALL, SMALL)}
    plans = Plans(monkeypatch, lambda plan, size: 1.0 if fast[size] == plan else 3.0)
    kernels = ExpertKernels()
    choice = choice_of(kernels, plans, [1, 6, 40])
    answer = choice.measure()
    assert answer == [*fast.values()]
    assert choice.admits(answer)
    choice.use(answer)
    x = torch.randn(5, 16, dtype=BF16)
    kernels.mix(x, x[:, :4].contiguous(), make_experts(4, 1, 16, 16, BF16, CPU), None)
    assert plans.used == (fast[6], 5)


def test_products_of_many_rows_have_tiles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = [GroupedTile(64, width, 16, 2, 4) for width in (32, 64, 128)]
    monkeypatch.setattr(module, "GROUPED_TILES", tiles)
    times = {tiles[0]: (1.0, 3.0), tiles[1]: (2.0, 2.0), tiles[2]: (3.0, 1.0)}  # of both products

    def take(plan: ExpertPlan, _: int) -> float:
        assert plan.gated is not None
        assert plan.down is not None
        return times.get(plan.gated, (5.0, 5.0))[0] + times.get(plan.down, (5.0, 5.0))[1]

    choice = choice_of(ExpertKernels(), Plans(monkeypatch, take), [255, 256])
    few, many = answer = choice.measure()
    assert few.gated == few.down
    assert many in (ExpertPlan(tiles[0], tile) for tile in tiles[1:])
    assert choice.admits(answer)
    assert not choice.admits([many, many]), "of too few rows"


def test_what_is_no_faster_does_not_replace_the_usual_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Plans(monkeypatch, lambda *_: 2.0)
    assert choice_of(ExpertKernels(), plans, [1, 64]).measure() == [choose_plan(size, 4, BF16) for size in (1, 64)]


def test_tiles_that_cannot_be_built_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUPED_TILES", (SMALL, OTHER))
    plans = Plans(monkeypatch, lambda plan, _: 1.0 if plan.gated == SMALL else 3.0)
    choice = choice_of(ExpertKernels(), plans, [40])
    assert choice.measure() == [ExpertPlan(SMALL, SMALL)]
    plans.broken = SMALL
    assert choice.measure() == [choose_plan(40, 4, BF16)]
    assert not choice.admits([ExpertPlan(SMALL, SMALL)])


def test_answers_of_other_tiles_or_sizes_are_not_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choice_of(ExpertKernels(), Plans(monkeypatch, lambda *_: 1.0), [40, 50])
    tile = GROUPED_TILES[0]
    assert choice.admits([ExpertPlan(tile, tile)] * 2)
    assert not choice.admits([ExpertPlan(tile, tile)])
    assert not choice.admits([ExpertPlan(tile, tile), ExpertPlan(SMALL, SMALL)])
    assert not choice.admits([ExpertPlan(tile, tile), ExpertPlan(tile, None)])  # torch's product is not here
    assert not choice.admits([ExpertPlan(tile, tile), STRAIGHT])  # of too many tokens


def test_an_answer_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choice = choice_of(ExpertKernels(), Plans(monkeypatch, lambda *_: 1.0), [1, 40])
    cache, answer = TuningCache(tmp_path, {}), choice.measure()
    cache.keep(choice.name, choice.describe(), answer)
    found: Any = cache.find(choice.name, choice.describe(), choice.kind)
    assert found == answer


def test_torchs_product_is_a_way_where_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    down = make_experts(2, 1, 16, 16, BF16, CPU).down
    assert not has_library(down)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "is_cuda", True)
        for capability, expected in (((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
            patched.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
            assert has_library(down) is expected
        patched.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        assert not has_library(down.half())
        assert not has_library(down[:, :3])
    monkeypatch.setattr(module, "has_library", lambda _: True)
    choice = choice_of(ExpertKernels(), Plans(monkeypatch, lambda plan, _: 1.0 if plan.down is None else 3.0), [64])
    (plan,) = choice.measure()
    assert plan.gated is not None
    assert plan.down is None


def test_each_shape_of_a_decoders_experts_has_a_choice(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=4, mlp_only_layers=[1]))
    decoder = build_decoder(spec, BF16, CPU)
    kernels = ExpertKernels()
    (choice,) = list_expert_choices(kernels, decoder, RowCounts(100))
    assert choice.describe()["sizes"] == [1, 2, 4, 8, 16, 32, 64, 100]
    (choice,) = list_expert_choices(kernels, decoder, RowCounts(100, exact=[64, 100]))
    assert choice.describe()["sizes"] == [64, 100]
    assert not [*list_expert_choices(None, decoder, RowCounts(100))]
    assert not [*list_expert_choices(kernels, build_decoder(spec, torch.float32, CPU), RowCounts(100))]
