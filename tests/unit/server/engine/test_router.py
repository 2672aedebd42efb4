from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka_async.server.engine.router import FACTOR, SLACK, ReplicaRouter

ALL = [0, 1, 2]


def prompt(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


@pytest.fixture
def router() -> ReplicaRouter:
    return ReplicaRouter(3, page_size=2)


def test_nothing_is_cached_and_the_least_busy_one_gets_it(router: ReplicaRouter) -> None:
    assert [router.place(prompt(i, i), 100 - i, ALL) for i in range(3)] == [0, 1, 2]
    assert router.place(prompt(9, 9), 5, ALL) == 2
    assert router.outstanding == [100, 99, 103]


def test_the_longest_cached_prefix_wins(router: ReplicaRouter) -> None:
    assert router.place(prompt(1, 2), 10, [1]) == 1
    assert router.place(prompt(1, 2, 3, 4), 10, [2]) == 2
    assert router.place(prompt(1, 2, 3, 4, 5, 6), 10, ALL) == 2
    assert router.place(prompt(1, 2, 7, 8), 10, ALL) == 1  # both have the first page; it has less to do
    assert router.place(prompt(1, 9, 3, 4), 10, ALL) == 0  # a page stands for all before it
    assert router.place(prompt(1, 2, 3), 10, [0, 2]) == 2  # what is left of a page does not count


def test_too_much_to_do_outweighs_the_prefix(router: ReplicaRouter) -> None:
    router.place(prompt(1, 2), SLACK, [0])
    assert router.place(prompt(1, 2), 1, ALL) == 0
    assert router.place(prompt(1, 2), 1, ALL) == 1
    router.release(0, 1)
    assert router.place(prompt(1, 2), 7, [0, 2]) == 0


def test_a_replica_that_is_gone_is_forgotten(router: ReplicaRouter) -> None:
    router.place(prompt(1, 2), 10, [2])
    router.release(2, 10)
    router.forget(2)
    assert router.place(prompt(1, 2), 10, ALL) == 0


def test_the_index_drops_what_was_used_longest_ago_and_ends_before_beginnings() -> None:
    router = ReplicaRouter(2, page_size=1, num_pages=3)
    router.place(prompt(1, 2, 3), 0, [1])
    router.place(prompt(8), 0, [1])
    assert router.place(prompt(1, 2), 0, [0, 1]) == 1
    router.place(prompt(1, 2), 0, [0])
    assert router.place(prompt(1, 2, 3), 0, [0, 1]) == 0, "the third page is not known any more"


def test_prompts_of_other_salts_are_not_seen() -> None:
    router = ReplicaRouter(2, page_size=1)
    first = router.place(prompt(1, 2, 3), SLACK, [0, 1], salt=7)
    assert router.place(prompt(1, 2, 3), 0, [0, 1], salt=7) == first
    assert router.place(prompt(1, 2, 3), 0, [0, 1], salt=8) != first
    assert router.place(prompt(1, 2, 3), 0, [0, 1]) != first


def test_one_replica_gets_everything() -> None:
    router = ReplicaRouter(1, page_size=1)
    assert router.place(prompt(1, 2, 3), 7, [0]) == 0
    assert router.outstanding == [7]


def test_less_than_nothing_is_a_bug(router: ReplicaRouter) -> None:
    router.place(prompt(1), 3, [0])
    with pytest.raises(AssertionError, match="replica 0 has less"):
        router.release(0, 4)


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
        st.integers(0, 3 * SLACK),
        st.sets(st.integers(0, 2), min_size=1),
        st.integers(0, 5),
        st.sampled_from([0, 1 << 62]),
    ),
    max_size=30,
)


@given(REQUESTS)
def test_choices_keep_the_rules(requests: list[tuple[list[int], int, set[int], int, int]]) -> None:
    router = ReplicaRouter(3, page_size=1)
    running: list[tuple[int, int]] = []
    holders: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)  # by salt and the tokens up to a page's end
    for ids, tokens, live, num_ended, salt in requests:
        before = list(router.outstanding)
        pages = [(salt, *ids[: end + 1]) for end in range(len(ids))]
        longest = live
        for page in pages:
            longest = longest & holders[page] or longest
        replica = router.place(prompt(*ids), tokens, sorted(live), salt)
        assert replica in live
        for page in pages:
            holders[page].add(replica)
        least = min(before[index] for index in live)
        if replica in longest:
            assert before[replica] <= FACTOR * least + SLACK
            assert before[replica] == min(before[index] for index in longest)
        else:
            assert before[replica] == least
            assert min(before[index] for index in longest) > FACTOR * least + SLACK
        running.append((replica, tokens))
        for replica, tokens in running[:num_ended]:
            router.release(replica, tokens)
        del running[:num_ended]
        assert router.outstanding == [sum(n for at, n in running if at == index) for index in range(3)]
