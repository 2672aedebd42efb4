"""What the table chooses, and from where on groups are worth sharing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from tests.cases.attention import AttentionCase, make_case
from toka_async.attention.base import AttentionBatch, PrefixGroup
from toka_async.attention.choice import (
    AutoChunks,
    AutoDecode,
    MeasuredShape,
    choose_always,
    find_nearest,
    find_smallest_groups,
)

PAGE = 4


@dataclass(slots=True)
class Part:
    """Remembers its calls; is of every kind."""

    calls: list[object] = field(default_factory=list)

    def plan(self, batch: AttentionBatch, *more: object) -> None:
        self.calls.append((batch, *more))

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:  # noqa: ARG002
        self.calls.append((layer, query, output))

    def plan_graph(self, batch: AttentionBatch, grouped: bool, window: int) -> None:
        self.calls.append((batch, grouped, window))

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        self.calls.append(groups)


def case_of(groups: list[tuple[int, int]], contexts: list[int], chunks: list[tuple[int, int]]) -> AttentionCase:
    return make_case(0, PAGE, 1, 1, 4, groups, contexts, chunks)


def test_the_nearest_point_is_so_by_factors() -> None:
    points = [MeasuredShape(1, 100, "a"), MeasuredShape(100, 100, "b"), MeasuredShape(100, 10_000, "c")]
    assert [find_nearest(points, size, 100) for size in (0, 1, 9, 11, 5000)] == ["a", "a", "a", "b", "b"]
    assert [find_nearest(points, 100, tokens) for tokens in (1, 100, 999, 1001, 1e6)] == ["b", "b", "b", "c", "c"]


@pytest.mark.parametrize(
    ("worth", "expected"),
    [
        ({}, ()),
        ({(2, 10): False, (4, 10): False}, ()),
        ({(2, 10): True, (4, 10): True}, ((2, 10),)),
        ({(2, 10): False, (4, 10): True, (2, 20): True, (4, 20): True}, ((2, 20), (4, 10))),
        ({(2, 10): True, (4, 10): True, (2, 20): True, (4, 20): False}, ()),  # large groups must gain, too
        (
            {(2, 10): False, (2, 20): False, (4, 10): False, (4, 20): True, (8, 10): True, (8, 20): True},
            ((4, 20), (8, 10)),
        ),
    ],
)
def test_the_smallest_groups(worth: dict[tuple[int, int], bool], expected: tuple[tuple[int, int], ...]) -> None:
    assert find_smallest_groups(worth) == expected


def test_which_groups_pay() -> None:
    table = choose_always("a", ((4, 20), (8, 10)))
    assert table.find_smallest_group() == (4, 10)
    assert [table.pays(*group) for group in ((4, 20), (8, 10), (7, 19), (100, 9), (3, 100))] == [
        True,
        True,
        *[False] * 3,
    ]
    assert choose_always("a").find_smallest_group() == (0, 0)
    assert not choose_always("a").pays(1000, 1000)


def test_decoding_is_chosen_by_rows_and_mean_context() -> None:
    parts = {"a": Part(), "b": Part()}
    points = (MeasuredShape(2, 10, "a"), MeasuredShape(2, 100, "b"))
    auto = AutoDecode(parts, replace(choose_always("a"), decode=points), PAGE)
    for contexts, expected in (([5, 20], "a"), ([5, 90], "b")):
        case = case_of([], contexts, [(500, 9)])  # chunks do not count
        auto.plan(case.batch, (), 7)
        auto.run(3, case.query, case.query)
        assert parts[expected].calls == [(case.batch, (), 7), (3, case.query, case.query)]


def test_groups_are_chosen_by_mean_rows_and_prefix() -> None:
    parts = {"a": Part(), "b": Part()}
    points = (MeasuredShape(2, 8, "a"), MeasuredShape(8, 8, "b"), MeasuredShape(2, 40, "b"))
    auto = AutoDecode(parts, replace(choose_always("none"), grouped=points), PAGE)
    for groups, expected in (([(2, 2), (3, 2)], "a"), ([(8, 2), (5, 2)], "b"), ([(2, 9)], "b")):
        batch = case_of(groups, [], []).batch
        auto.plan(batch, batch.groups, 0)
        assert parts[expected].calls.pop() == (batch, batch.groups, 0)


def test_chunks_are_chosen_by_tokens_and_mean_context() -> None:
    parts = {"a": Part(), "b": Part()}
    points = (MeasuredShape(10, 10, "a"), MeasuredShape(100, 10, "b"), MeasuredShape(10, 100, "b"))
    auto = AutoChunks(parts, replace(choose_always("a"), chunks=points))
    for chunks, expected in (([(0, 9)], "a"), ([(0, 9)] * 8, "b"), ([(90, 9)], "b")):
        case = case_of([], [200], chunks)  # decoding rows do not count
        auto.plan(case.batch, 5)
        auto.run(1, case.query, case.query)
        assert parts[expected].calls == [(case.batch, 5), (1, case.query, case.query)]
        parts[expected].calls.clear()


def test_a_single_part_needs_no_table() -> None:
    part = Part()
    case = case_of([(2, 2)], [3], [(0, 9)])
    AutoDecode({"b": part}, choose_always("a"), PAGE).plan(case.batch, case.batch.groups, 0)
    AutoChunks({"b": part}, choose_always("a")).plan(case.batch, 0)
    assert part.calls == [(case.batch, case.batch.groups, 0), (case.batch, 0)]


def test_graphs_are_of_the_part_that_can_be_captured() -> None:
    part, captured = Part(), Part()
    auto = AutoDecode({"a": part}, choose_always("a"), PAGE, captured)
    batch, query = case_of([(2, 2)], [], []).batch, torch.zeros(1)
    auto.plan_graph(batch, True, 6)
    auto.run(0, query, query)
    auto.set_groups(batch.groups)
    assert (part.calls, captured.calls) == ([], [(batch, True, 6), (0, query, query), batch.groups])
    auto.plan(batch, (), 0)
    auto.run(1, query, query)
    assert part.calls == [(batch, (), 0), (1, query, query)]


def test_a_summary() -> None:
    assert choose_always("a", ((4, 64),)).summarize().endswith("chunks a 1; groups of rows x tokens 4x64")
    two = replace(
        choose_always("a"), decode=(MeasuredShape(1, 1, "a"), MeasuredShape(1, 2, "b"), MeasuredShape(1, 3, "b"))
    )
    assert two.summarize() == "decode b 2, a 1; grouped a 1; chunks a 1; no groups"
