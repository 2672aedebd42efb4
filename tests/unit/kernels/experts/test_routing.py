from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.experts import draw
from toka_async.kernels.experts import routing
from toka_async.kernels.experts.routing import Routes, place, route
from toka_async.model.matrices.torch_experts import choose_experts


def check_placement(routes: Routes, first: int, num_own: int) -> None:
    """Each own pair has a place, in the order of experts, then of tokens."""
    placement = place(routes, first, num_own)
    chosen = routes.ids.flatten().tolist()
    own = sorted((number, pair) for pair, number in enumerate(chosen) if first <= number < first + num_own)
    assert placement.pairs[: len(own)].tolist() == [pair for _, pair in own]
    places = {pair: index for index, (_, pair) in enumerate(own)}
    assert placement.places.tolist() == [places.get(pair, -1) for pair in range(len(chosen))]
    ends = [sum(number <= each for number, _ in own) for each in range(first, first + num_own)]
    assert placement.ends.tolist() == ends


@pytest.mark.parametrize("renormalizes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (17, 60, 4), (50, 128, 8), (16, 5, 5), (33, 512, 10), (3, 1, 1)]
)
def test_routes_equal_plain_torch(
    device: torch.device, num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, renormalizes: bool
) -> None:
    logits = draw(num_tokens, num_experts, dtype=dtype, device=device)
    routes = route(logits, top_k, renormalizes)
    ids, shares = choose_experts(logits, top_k, renormalizes)
    assert torch.equal(routes.ids.long(), ids)  # bfloat16 has ties
    torch.testing.assert_close(routes.shares, shares)
    assert torch.equal(routes.counts.sum(0), torch.bincount(ids.flatten(), minlength=num_experts))
    check_placement(routes, 0, num_experts)


@pytest.mark.parametrize("most_programs", [1, 3])
def test_programs_take_turns(device: torch.device, monkeypatch: pytest.MonkeyPatch, most_programs: int) -> None:
    monkeypatch.setattr(routing, "_MOST_PROGRAMS", most_programs)
    logits = draw(100, 6, dtype=torch.float32, device=device)
    routes = route(logits, 2, True)
    assert len(routes.counts) <= most_programs
    assert torch.equal(routes.ids.long(), choose_experts(logits, 2, True)[0])
    check_placement(routes, 0, 6)
    check_placement(routes, 2, 3)


def test_more_programs_than_are_summed_at_once(device: torch.device) -> None:
    routes = route(draw(16 * 20 + 1, 4, dtype=torch.float32, device=device), 1, False)
    assert len(routes.counts) == 21
    check_placement(routes, 0, 4)


@pytest.mark.parametrize(("first", "num_own"), [(0, 3), (3, 3), (6, 2)])
def test_a_rank_places_the_pairs_of_its_experts(device: torch.device, first: int, num_own: int) -> None:
    logits = draw(40, 8, dtype=torch.float32, device=device)
    logits[:, 4] = -100.0  # an expert without tokens
    check_placement(route(logits, 3, True), first, num_own)


def test_all_tokens_may_choose_the_same_experts(device: torch.device) -> None:
    logits = torch.zeros(20, 7, device=device)
    routes = route(logits, 3, False)
    assert routes.ids.tolist() == [[0, 1, 2]] * 20
    torch.testing.assert_close(routes.shares, torch.full((20, 3), 1 / 7, device=device))
    check_placement(routes, 0, 7)


def test_loads_are_added_up_without_padding(device: torch.device) -> None:
    logits = draw(40, 8, dtype=torch.float32, device=device)
    loads, counted = torch.full((8,), 5, device=device), torch.tensor([25], dtype=torch.int32, device=device)
    route(logits, 2, True, loads)
    assert torch.equal(loads - 5, count(logits))
    route(logits, 2, True, loads, counted)
    assert torch.equal(loads - 5, count(logits) + count(logits[:25]))


def count(logits: Tensor) -> Tensor:
    return torch.bincount(choose_experts(logits, 2, True)[0].flatten(), minlength=8)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_ids_are_distinct_experts_for_any_logits(device: torch.device, value: float) -> None:
    logits = torch.zeros(3, 4, device=device)
    logits[0], logits[1, 2] = value, value
    routes = route(logits, 3, True)
    for ids in routes.ids.tolist():
        assert len(set(ids)) == 3
        assert set(ids) <= set(range(4))
    assert routes.ids[1, 0] == (2 if value == float("inf") else 0)
    assert bool(routes.shares.isfinite().all())
