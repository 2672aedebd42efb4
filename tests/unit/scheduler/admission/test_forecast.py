from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toka_async.arrays import Int32
from toka_async.scheduler.admission.forecast import (
    UsageCurve,
    count_last_uses,
    forecast_own_pages,
    forecast_shared_pages,
    forecast_window_pages,
    sample_evenly,
)

SEQUENCES = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 90), st.integers(0, 6)), min_size=1, max_size=20)


def simulate(position: Int32, remaining: Int32, held: Int32, page_size: int, horizon: int) -> list[int]:
    pages = held.tolist()
    usage = []
    for step in range(horizon):
        for i in range(position.size):
            if step == remaining[i]:
                pages[i] = 0
            elif step < remaining[i] and (position[i] + step) % page_size == 0:
                pages[i] += 1
        usage.append(sum(pages))
    return usage


def columns(rows: list[tuple[int, int, int]]) -> tuple[Int32, Int32, Int32]:
    position, remaining, held = np.asarray(rows, dtype=np.int32).T
    return position, remaining, held


@given(rows=SEQUENCES, page_size=st.integers(1, 20), horizon=st.integers(1, 130))
def test_own_pages_equal_a_simulation(rows: list[tuple[int, int, int]], page_size: int, horizon: int) -> None:
    position, remaining, held = columns(rows)
    usage = forecast_own_pages(position, remaining, held, page_size, horizon)
    assert usage.tolist() == simulate(position, remaining, held, page_size, horizon)


@given(rows=SEQUENCES, page_size=st.integers(1, 20), window=st.integers(1, 40), horizon=st.integers(1, 130))
def test_window_pages_equal_a_simulation(
    rows: list[tuple[int, int, int]], page_size: int, window: int, horizon: int
) -> None:
    """Of a row's pages of its own, those that the token of a step sees."""
    position, remaining, num_shared = columns(rows)
    num_shared = np.minimum(num_shared, position // page_size).astype(np.int32)
    usage = forecast_window_pages(position, remaining, num_shared, window, page_size, horizon)

    def count(i: int, step: int) -> int:
        token = int(position[i]) + step
        first = max(max(0, token - window + 1) // page_size, int(num_shared[i]))
        return token // page_size - first + 1 if step < remaining[i] else 0

    assert usage.tolist() == [sum(count(i, step) for i in range(len(rows))) for step in range(horizon)]


@given(groups=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), max_size=10), horizon=st.integers(1, 40))
def test_shared_pages_are_held_until_their_end(groups: list[tuple[int, int]], horizon: int) -> None:
    ends = np.asarray([end for end, _ in groups], dtype=np.int32)
    counts = np.asarray([count for _, count in groups], dtype=np.int32)
    usage = forecast_shared_pages(ends, counts, horizon)
    assert usage.tolist() == [sum(count for end, count in groups if step < end) for step in range(horizon)]


@given(prompts=st.lists(st.tuples(st.integers(1, 20), st.sets(st.integers(0, 11), max_size=6)), max_size=8))
def test_a_page_of_several_prompts_counts_once_until_the_last_ends(prompts: list[tuple[int, set[int]]]) -> None:
    pages = np.asarray([page for _, used in prompts for page in sorted(used)], dtype=np.int32)
    ends = np.asarray([end for end, used in prompts for _ in used], dtype=np.int32)
    distinct, counts = count_last_uses(pages, ends, 12)
    latest = [max((end for end, used in prompts if page in used), default=0) for page in range(12)]
    assert dict(zip(distinct.tolist(), counts.tolist(), strict=True)) == {
        end: latest.count(end) for end in set(latest) if end > 0
    }


@given(rows=SEQUENCES, new=st.tuples(st.integers(1, 50), st.integers(1, 90)), limit=st.integers(0, 120))
def test_room_is_the_largest_count_that_fits(
    rows: list[tuple[int, int, int]], new: tuple[int, int], limit: int
) -> None:
    curve = UsageCurve(forecast_own_pages(*columns(rows), page_size=4, horizon=40).astype(np.float64))
    profile = forecast_own_pages(*columns([(new[0], new[1], 1)]), page_size=4, horizon=new[1]).astype(np.float64)
    room = curve.count_that_fit(profile, limit)
    if room > 0:
        fits = UsageCurve(curve.curve.copy())
        fits.add(profile, room)
        assert (fits.curve[: profile.size] <= limit).all()
    over = UsageCurve(curve.curve.copy())
    over.add(profile, room + 1)
    assert (over.curve[: profile.size] > limit).any()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=100), st.integers(1, 40))
def test_evenly_spaced_numbers_of_a_curve(pages: list[int], most: int) -> None:
    numbers = sample_evenly(UsageCurve(np.asarray(pages, np.float64), rest=11.0), most)
    assert len(numbers) == min(most, len(pages)) + 1
    assert (numbers[0], numbers[-1]) == (pages[0], 11)
    if most >= len(pages):
        assert numbers == (*pages, 11)
