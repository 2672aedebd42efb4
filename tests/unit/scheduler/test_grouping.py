from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drivers.core import Received
from tests.drivers.page_rank import submit
from tests.drivers.small_core import SmallCore, got, wanted
from tests.unit.scheduler.test_run_tree import naive_groups, pages_of
from toka_async.arrays import Int32, as_i32, i32_column
from toka_async.messages import TokenSampling
from toka_async.scheduler.grouping import NO_GROUPS, Grouping
from toka_async.scheduler.sequences.requests import PrefillTask, PromptRun, Request

LONG = list(range(1, 22))  # five pages of four


def run_of(key: int, pages: tuple[int, ...]) -> PromptRun:
    prompt = np.arange(4 * len(pages) + 1, dtype=np.int32)
    request = Request(submit(key, prompt.tolist()), prompt, arrival=key, num_open=1)
    task = PrefillTask(request, sample=0, token_ids=prompt)
    return PromptRun(key, task, prompt.size, 0, prompt.size, [], np.asarray(pages, np.int32))


def runs_of(*paths: tuple[int, ...]) -> dict[int, PromptRun]:
    return {key: run_of(key, pages) for key, pages in enumerate(paths)}


def keys(*values: int) -> Int32:
    return np.asarray(values, np.int32)


def columns(grouping: Grouping) -> list[tuple[int, int, int]]:
    """First row, rows and pages of each group."""
    parts = (grouping.columns.starts, grouping.columns.rows, grouping.columns.pages)
    return list(zip(*(as_i32(part).tolist() for part in parts), strict=True))


def test_rows_of_a_run_are_a_group() -> None:
    grouping = Grouping(min_seqs=2, min_pages=1)
    assert grouping.update(keys(0, 0, 0, 1, 2, 2), runs_of((1, 2), (3,), (4, 5, 6))) is None
    assert columns(grouping) == [(0, 3, 2), (4, 2, 3)]


def test_too_few_rows_or_pages_are_none() -> None:
    grouping = Grouping(min_seqs=3, min_pages=2)
    assert grouping.update(keys(0, 0, 1, 1, 1, 1), runs_of((1, 2), (3,))) is None
    assert grouping.columns == NO_GROUPS


def test_rows_that_join_their_group_at_the_end_take_no_new_order() -> None:
    grouping, runs = Grouping(min_seqs=2, min_pages=1), runs_of((1,), (2,))
    assert grouping.update(keys(1, 1, 0, 0), runs) is None
    assert grouping.update(keys(1, 1, 0, 0, 0), runs) is None
    assert columns(grouping) == [(0, 2, 1), (2, 3, 1)]


def test_rows_apart_are_brought_together_when_there_is_time() -> None:
    grouping, runs = Grouping(min_seqs=2, min_pages=1), runs_of((1,), (2,), ())
    rows = keys(0, 2, 0, 1, 1, 0)
    assert grouping.update(rows, runs, reorder=False) is None
    assert columns(grouping) == [(3, 2, 1)]
    assert grouping.wants_order
    order = grouping.update(rows, runs)
    assert order is not None
    assert order.tolist() == [1, 3, 4, 0, 2, 5]
    assert columns(grouping) == [(1, 2, 1), (3, 3, 1)]
    assert not grouping.wants_order


def test_few_rows_apart_stay_there() -> None:
    """A new order is told of when it pays."""
    grouping, runs = Grouping(min_seqs=2, min_pages=1), runs_of((1,), (2,))
    rows = [0] * 100 + [1] * 100
    assert grouping.update(keys(*rows, 0, 0, 0), runs) is None
    assert columns(grouping) == [(0, 100, 1), (100, 100, 1)]
    order = grouping.update(keys(*rows, 0, 0, 0, 0), runs)
    assert order is not None
    assert columns(grouping) == [(0, 100, 1), (100, 104, 1)]


def test_a_part_of_the_rows_has_groups_of_its_own() -> None:
    runs, rows = runs_of((1,), (2,)), keys(0, 0, 0, 1, 1, 1)
    halves = [Grouping(min_seqs=2, min_pages=1) for _ in range(2)]
    for grouping, part in zip(halves, (rows[:2], rows[2:]), strict=True):
        grouping.update(part, runs)
    assert [columns(grouping) for grouping in halves] == [[(0, 2, 1)], [(1, 3, 1)]]


PATHS = st.lists(st.integers(0, 2), max_size=5)


@given(
    min_seqs=st.integers(2, 4),
    min_pages=st.integers(1, 3),
    paths=st.lists(PATHS, min_size=1, max_size=8),
    data=st.data(),
)
def test_groups_are_the_greedy_ones_of_the_rows(
    min_seqs: int, min_pages: int, paths: list[list[int]], data: st.DataObject
) -> None:
    """However rows joined and left, the columns are what brute force finds among them, and so is a fresh start."""
    numbers: dict[tuple[int, ...], int] = {}
    runs = runs_of(*(pages_of(path, numbers) for path in paths))
    grouping, rows = Grouping(min_seqs, min_pages), list[int]()
    for _ in range(5):
        stay = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
        joined = data.draw(st.lists(st.integers(0, len(paths) - 1), max_size=8))
        rows = [row for row, stays in zip(rows, stay, strict=True) if stays] + joined
        order = grouping.update(keys(*rows), runs)
        rows = rows if order is None else [rows[i] for i in order.tolist()]
        grouping.check()
        assert sorted(order.tolist() if order is not None else range(len(rows))) == list(range(len(rows)))
        found = {(tuple(rows[start : start + count]), pages) for start, count, pages in columns(grouping)}
        counts = Counter(rows)
        greedy = naive_groups(
            {key: (tuple(runs[key].pages.tolist()), count) for key, count in counts.items()}, min_seqs, min_pages
        )
        assert {(frozenset(part), pages) for part, pages in found} == {(group, len(pages)) for pages, group in greedy}
        assert all(len(part) == sum(counts[key] for key in set(part)) for part, _ in found)
        fresh = Grouping(min_seqs, min_pages)
        assert fresh.update(keys(*rows), runs) is None
        assert fresh.columns == grouping.columns


# ---- in the core


@pytest.mark.parametrize("steps_ahead", [1, 3])
def test_samples_of_prompts_are_groups_on_the_rank(steps_ahead: int) -> None:
    core = SmallCore(max_seqs=16, num_pages=200, steps_ahead=steps_ahead, group_min_seqs=3, group_min_tokens=8)
    received = [core.submit(submit(i, [*LONG, i], n=5, max_tokens=9)) for i in range(4)]
    core.drain()
    assert [got(entry) for entry in received] == [wanted(entry) for entry in received]
    assert core.pages.num_grouped > 0.8 * 4 * 5 * 9


def test_prompts_with_a_common_prefix_are_a_group() -> None:
    core = SmallCore(max_seqs=8, num_pages=200, max_tokens=64, group_min_seqs=4, group_min_tokens=20)
    core.submit(submit(99, LONG, max_tokens=1))
    core.drain()
    received = [core.submit(submit(i, [*LONG, i, i], max_tokens=20)) for i in range(6)]
    core.drain()
    assert [got(entry) for entry in received] == [wanted(entry) for entry in received]
    assert core.pages.num_grouped == 6 * 19  # all but each one's first token


def alternating(core: SmallCore, count: int) -> list[Received]:
    """Requests whose prompts begin with one of two prefixes in turn; all that follow the first two are cached."""
    return [core.submit(submit(i, [*LONG[:: 1 - 2 * (i % 2)], i], max_tokens=12)) for i in range(count)]


@pytest.mark.parametrize("steps_ahead", [1, 3])
def test_rows_change_places_and_keep_their_tokens(steps_ahead: int) -> None:
    core = SmallCore(num_pages=200, steps_ahead=steps_ahead, group_min_seqs=3, group_min_tokens=20)
    received = alternating(core, 8)
    num_orders = 0
    while True:
        core.build()
        if not core.queued:
            break
        num_orders += sum(bool(step.order) for step in core.queued)
        core.complete()
        core.core.check()
    assert [got(entry) for entry in received] == [wanted(entry) for entry in received]
    assert core.pages.num_grouped > 50
    assert num_orders > 0


def test_a_new_order_waits_until_the_ranks_have_work() -> None:
    core = SmallCore(num_pages=200, steps_ahead=2, group_min_seqs=3, group_min_tokens=20)
    received = alternating(core, 6)
    core.build()
    core.complete()
    core.complete()
    core.build()
    urgent, next_one = core.queued
    assert not urgent.order
    assert not urgent.group_starts
    assert as_i32(urgent.joined).size == 5
    assert as_i32(next_one.order).size == 6
    assert as_i32(next_one.group_rows).tolist() == [3, 3]
    core.drain()
    assert [got(entry) for entry in received] == [wanted(entry) for entry in received]


def test_preempted_samples_come_back_to_their_group() -> None:
    core = SmallCore(num_pages=20, steps_ahead=2, group_min_seqs=2, group_min_tokens=4)
    ends = TokenSampling(end_ids=i32_column([3]))
    received = [core.submit(submit(i, [*LONG[:9], i], n=3, max_tokens=14, sampling=ends)) for i in range(3)]
    core.drain()
    assert core.stats.num_preemptions > 0
    assert [got(entry) for entry in received] == [wanted(entry) for entry in received]
    assert core.pages.num_grouped > 0


def test_without_groups_nothing_is_said_of_them() -> None:
    core = SmallCore()
    core.submit(submit(0, LONG, n=6, max_tokens=3))
    core.build()
    for step in core.queued:
        assert [*map(len, (step.order, step.group_starts, step.group_rows, step.group_pages))] == [0, 0, 0, 0]
    core.drain()
    assert core.pages.num_grouped == 0
