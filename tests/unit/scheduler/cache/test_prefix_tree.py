from __future__ import annotations

import pytest

from tests.cases.columns import ids
from toka_async.arrays import Int32
from toka_async.scheduler.cache.prefix_tree import Node, PrefixTree


def fill(tree: PrefixTree, tokens: Int32, pages: list[int]) -> list[Node]:
    """Insert the tokens' pages (of two tokens), which the caller then owns."""
    nodes: list[Node] = []
    for i, page in enumerate(pages):
        node = tree.insert(nodes[-1] if nodes else None, tokens[2 * i : 2 * i + 2], page)
        assert node is not None
        nodes.append(node)
    return nodes


def pages(nodes: list[Node]) -> list[int]:
    return [node.page for node in nodes]


def test_the_longest_prefix_of_whole_pages_is_found() -> None:
    tree = PrefixTree(2)
    fill(tree, ids(1, 2, 3, 4, 5, 6), [10, 11, 12])
    assert pages(tree.match(ids(1, 2, 3, 4, 5, 6), 9)) == [10, 11, 12]
    assert pages(tree.match(ids(1, 2, 3, 4, 9, 6), 9)) == [10, 11]
    assert pages(tree.match(ids(1, 2, 3), 9)) == [10]
    assert pages(tree.match(ids(1, 2, 3, 4, 5, 6), 1)) == [10]
    assert tree.match(ids(3, 4), 9) == []


def test_salts_share_nothing() -> None:
    tree = PrefixTree(2)
    fill(tree, ids(1, 2, 3, 4), [10, 11])
    assert tree.match(ids(1, 2, 3, 4), 9, salt=5) == []
    node = tree.insert(None, ids(1, 2), 12, salt=5)
    assert node is not None
    assert pages(tree.match(ids(1, 2, 3, 4), 9, salt=5)) == [12]
    assert pages(tree.match(ids(1, 2, 3, 4), 9)) == [10, 11]
    assert tree.match(ids(1, 2), 9, salt=6) == []
    tree.check()


def test_a_twin_is_refused_and_not_owned() -> None:
    tree = PrefixTree(2)
    (node,) = fill(tree, ids(1, 2), [10])
    assert tree.insert(None, ids(1, 2), 11) is None
    assert node.num_owners == 1
    assert (tree.num_owned, tree.num_cached) == (1, 0)


def test_pages_stay_when_their_last_owner_leaves() -> None:
    tree = PrefixTree(2)
    nodes = fill(tree, ids(1, 2, 3, 4), [10, 11])
    tree.acquire(nodes[:1])
    tree.release(nodes)
    assert (tree.num_owned, tree.num_cached) == (1, 1)
    tree.release(nodes[:1])
    assert (tree.num_owned, tree.num_cached) == (0, 2)
    assert pages(tree.match(ids(1, 2, 3, 4), 9)) == [10, 11]
    tree.check()


def test_leaves_are_evicted_before_their_parents_and_oldest_first() -> None:
    tree = PrefixTree(2)
    old, new = fill(tree, ids(1, 2, 3, 4), [10, 11]), fill(tree, ids(5, 6, 7, 8), [12, 13])
    tree.release(new)
    tree.release(old)
    tree.acquire(new)
    tree.release(new)  # now `old` is the one not used for longest
    assert tree.evict(1).tolist() == [11]
    assert tree.evict(2).tolist() == [10, 13]
    assert (tree.num_owned, tree.num_cached) == (0, 1)
    tree.check()


def test_owned_pages_are_never_evicted() -> None:
    tree = PrefixTree(2)
    kept, left = fill(tree, ids(1, 2), [10]), fill(tree, ids(3, 4), [11])
    tree.release(left)
    assert tree.evict(1).tolist() == [11]
    with pytest.raises(AssertionError):
        tree.evict(1)
    assert pages(tree.match(ids(1, 2), 1)) == pages(kept)


def test_a_released_node_with_a_living_child_waits_for_it() -> None:
    tree = PrefixTree(2)
    nodes = fill(tree, ids(1, 2, 3, 4), [10, 11])
    tree.release(nodes)
    (parent,) = tree.match(ids(1, 2), 1)
    tree.acquire([parent])
    tree.release([parent])  # used last, but its child is not in use: the child goes first
    assert tree.evict(2).tolist() == [11, 10]


def test_an_evicted_page_can_be_inserted_anew() -> None:
    tree = PrefixTree(2)
    tree.release(fill(tree, ids(1, 2), [10]))
    tree.evict(1)
    assert tree.match(ids(1, 2), 1) == []
    assert pages(fill(tree, ids(1, 2), [10])) == [10]
    tree.check()


def test_reuse_without_eviction_does_not_pile_up_offers() -> None:
    tree = PrefixTree(2)
    nodes = fill(tree, ids(1, 2, 3, 4), [10, 11])
    for _ in range(1000):
        tree.release(nodes)
        tree.acquire(nodes)
    assert len(tree._evictable) < 100
    tree.release(nodes)
    assert tree.evict(2).tolist() == [11, 10]
