from __future__ import annotations

import numpy as np
import pytest

from tests.cases.columns import ids
from toka_async.scheduler.cache.pages import FEW, PageChains, PagePool


def test_pages_taken_are_distinct_and_come_back() -> None:
    pool = PagePool(10)
    first, second = pool.take(4), pool.take(6)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(10))
    assert pool.num_free == 0
    pool.give(first)
    assert pool.num_free == 4
    assert sorted(pool.take(4).tolist()) == sorted(first.tolist())


def test_taken_pages_are_a_copy() -> None:
    """Giving other pages back writes the stack where the taken ones lay."""
    pool = PagePool(4)
    first, second = pool.take(2), pool.take(2)
    before = second.tolist()
    pool.give(first)
    assert second.tolist() == before


def test_more_pages_than_there_are_is_a_defect() -> None:
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(AssertionError):
        pool.take(2)
    with pytest.raises(AssertionError):
        pool.give(ids(0, 1, 2))


def test_check_finds_a_page_given_twice() -> None:
    pool = PagePool(3)
    page = pool.take(2)[:1]
    pool.give(page)
    pool.give(page)
    with pytest.raises(AssertionError):
        pool.check()


@pytest.mark.parametrize("num_chains", [1, 3, FEW, FEW + 1, 3 * FEW])
def test_chains_give_all_their_pages(num_chains: int) -> None:
    chains, heads = PageChains(num_chains * 5), np.full(num_chains, -1, np.int32)
    lengths = np.arange(num_chains) % 5
    for length in range(5):
        growing = np.flatnonzero(lengths > length)
        pages = (growing * 5 + length).astype(np.int32)
        chains.append(heads[growing], pages)
        heads[growing] = pages
    collected = chains.collect(heads)
    assert collected.dtype == np.int32
    assert sorted(collected.tolist()) == [i * 5 + j for i in range(num_chains) for j in range(int(lengths[i]))]
    assert sorted(chains.collect(heads[:1]).tolist()) == list(range(int(lengths[0])))


def test_a_chain_is_collected_newest_first() -> None:
    chains = PageChains(8)
    chains.append(ids(-1), ids(3))
    chains.append(ids(3), ids(7))
    chains.append(ids(7), ids(1))
    assert chains.collect(ids(1)).tolist() == [1, 7, 3]


def test_no_chains_have_no_pages() -> None:
    assert PageChains(4).collect(ids(-1, -1)).tolist() == []


def test_a_very_long_chain() -> None:
    num_pages = 131_072
    chains = PageChains(num_pages)
    chains.append(np.arange(-1, num_pages - 1, dtype=np.int32), np.arange(num_pages, dtype=np.int32))
    assert chains.collect(ids(num_pages - 1)).tolist() == list(range(num_pages - 1, -1, -1))
