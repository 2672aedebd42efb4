from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka_async.arrays import Int32
from toka_async.scheduler.cache.window_pool import WindowPool, count_window_span


def make_pool(num_window_pages: int = 6, window: int = 5, page_size: int = 4, num_pages: int = 20) -> WindowPool:
    return WindowPool(num_pages, page_size, num_window_pages, window)


def pages(*numbers: int) -> Int32:
    return np.asarray(numbers, np.int32)


def keep(pool: WindowPool, *numbers: int) -> None:
    """Pages of the tree with their tokens, which nobody uses."""
    pool.hold(pages(*numbers))
    for number in numbers:
        pool.enter_tree(number)
        pool.drop(pages(number))


def test_what_nobody_uses_goes_back_unless_the_tree_has_it() -> None:
    pool = make_pool()
    pool.hold(pages(3, 7))
    pool.enter_tree(7)
    pool.hold(pages(7), 2)
    pool.drop(pages(3, 7, 7))
    assert pool.num_used == 1
    pool.check(pages(7))
    pool.drop(pages(7))
    assert (pool.num_used, pool.num_cached, pool.num_reclaimable) == (0, 1, 6)
    assert pool.beside[3] == -1
    assert pool.beside[7] >= 0
    pool.leave_tree(7)
    assert (pool.num_cached, pool.num_reclaimable) == (0, 6)
    pool.check(pages())


def test_the_least_recently_used_makes_way() -> None:
    pool = make_pool()
    keep(pool, 1, 2, 3)
    pool.hold(pages(1))
    pool.drop(pages(1))
    pool.hold(pages(10, 11, 12, 13))
    assert pool.beside[2] < 0
    assert pool.beside[1] >= 0
    pool.check(pages(10, 11, 12, 13))


def test_a_page_without_all_of_its_tokens_is_not_kept() -> None:
    """Its tokens were known and are computed again; whoever did so has left."""
    pool = make_pool()
    keep(pool, 4)
    pool.hold(pages(8, 9, 10, 11, 12, 13))  # takes page 4's
    pool.drop(pages(8, 9, 10, 11, 12, 13))
    pool.hold(pages(4))
    assert pool.count_usable(pages(4)) == 0
    pool.complete(pages(4))
    assert pool.count_usable(pages(4)) == 1
    pool.drop(pages(4))
    assert pool.num_cached == 1
    pool.hold(pages(8, 9, 10, 11, 12, 13))
    pool.drop(pages(8, 9, 10, 11, 12, 13))
    pool.hold(pages(4))
    pool.drop(pages(4))
    assert pool.num_cached == 0
    pool.check(pages())


def test_changes_say_what_is_beside_a_page_in_the_end() -> None:
    pool = make_pool()
    assert pool.take_changed().size == 0
    pool.hold(pages(5, 2))
    pool.drop(pages(5))
    pool.hold(pages(6))
    assert pool.take_changed().tolist() == [[2, pool.beside[2]], [6, pool.beside[6]]]
    pool.hold(pages(2))  # it is there
    assert pool.take_changed().size == 0


@given(
    window=st.integers(1, 20),
    page_size=st.integers(1, 6),
    there=st.lists(st.booleans(), max_size=12),
)
def test_a_prompt_begins_where_its_next_token_sees_all(window: int, page_size: int, there: list[bool]) -> None:
    pool = make_pool(num_window_pages=30, window=window, page_size=page_size, num_pages=30)
    keep(pool, *(place for place, is_there in enumerate(there) if is_there))
    found = pool.count_usable(np.arange(len(there), dtype=np.int32))

    def sees_all(count: int) -> bool:
        position = count * page_size
        seen = range(max(0, position - window + 1), position)
        return all(there[token // page_size] for token in seen)

    assert found == max(count for count in range(len(there) + 1) if sees_all(count))


@given(window=st.integers(1, 30), page_size=st.integers(1, 9), position=st.integers(0, 200))
def test_no_token_sees_more_pages_than_a_span(window: int, page_size: int, position: int) -> None:
    pool = make_pool(num_window_pages=20, window=window, page_size=page_size)
    seen = position // page_size - pool.find_first(position) + 1
    assert seen <= count_window_span(window, page_size)
    assert pool.find_first(position) * page_size <= max(0, position - window + 1)


def test_pages_in_use_count_for_nothing() -> None:
    pool = make_pool()
    keep(pool, 1)
    pool.hold(pages(2))
    assert pool.count_new(pages(1, 2, 3)) == 2
    assert pool.count_holdable(pages(2, 3, 4, 5, 6, 7, 8)) == 6
    assert pool.count_holdable(pages(3, 4, 5, 6, 7, 8)) == 5


def test_too_few_for_a_sequence_are_refused() -> None:
    with pytest.raises(AssertionError):
        make_pool(num_window_pages=3)
