from __future__ import annotations

import pytest

from tests.cases.columns import ids
from toka_async.arrays import Int32
from toka_async.scheduler.cache.prefix_cache import PageCache


def cached(cache: PageCache, tokens: Int32) -> None:
    """Put a prompt's only page into the tree and leave it."""
    node = cache.tree.insert(None, tokens, int(cache.take(1)[0]))
    assert node is not None
    cache.release([node])


def test_cached_pages_are_evicted_only_when_free_ones_run_out() -> None:
    cache = PageCache(4, 2, prefix=True)
    cached(cache, ids(1, 2))
    assert cache.num_reclaimable == 4
    taken = [cache.take(3)]
    cache.check(taken)
    assert cache.tree.num_cached == 1
    taken.append(cache.take(1))
    cache.check(taken)
    assert (cache.tree.num_cached, cache.num_used) == (0, 4)


def test_a_lookup_owns_what_it_finds_and_leaves_a_token_to_compute() -> None:
    cache = PageCache(4, 2, prefix=True)
    cached(cache, ids(1, 2))
    assert cache.lookup(ids(1, 2)) == []
    nodes = cache.lookup(ids(1, 2, 3))
    assert len(nodes) == 1
    assert cache.num_reclaimable == 3
    cache.release(nodes)
    assert cache.num_reclaimable == 4


def test_without_a_prefix_cache_nothing_is_found() -> None:
    cache = PageCache(4, 2, prefix=False)
    cached(cache, ids(1, 2))
    assert cache.lookup(ids(1, 2, 3)) == []


def test_check_finds_a_lost_page() -> None:
    cache = PageCache(4, 2, prefix=True)
    cache.take(1)
    with pytest.raises(AssertionError, match="3 pages of 4"):
        cache.check([])
