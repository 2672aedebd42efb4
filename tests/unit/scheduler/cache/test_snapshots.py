from __future__ import annotations

from toka_async.scheduler.cache.prefix_tree import Node
from toka_async.scheduler.cache.snapshots import SnapshotPool


def make_nodes(count: int) -> list[Node]:
    root = Node(page=-1, key=b"", parent=None)
    return [Node(page=i, key=bytes([i]), parent=root) for i in range(count)]


def test_the_least_recently_used_snapshot_is_taken_again() -> None:
    pool, (first, second, third) = SnapshotPool(2), make_nodes(3)
    pool.attach(first, pool.take())
    pool.attach(second, pool.take())
    used = pool.use(first)
    pool.attach(third, pool.take())
    assert first in pool
    assert second not in pool
    assert pool.use(first) == used
    pool.check([])
    assert (pool.num_cached, pool.num_held, pool.num_reclaimable) == (2, 0, 2)


def test_what_is_held_is_not_taken() -> None:
    pool, (node,) = SnapshotPool(1), make_nodes(1)
    held = pool.take()
    assert pool.take() == -1
    assert pool.num_held == 1
    pool.check([held])
    pool.attach(node, held)
    assert pool.detach(node) == held
    pool.give(held)
    pool.check([])


def test_a_node_has_one_snapshot() -> None:
    pool, (node,) = SnapshotPool(2), make_nodes(1)
    first = pool.take()
    pool.attach(node, first)
    pool.attach(node, pool.take())
    assert pool.use(node) == first
    pool.drop(node)
    pool.drop(node)
    assert pool.num_reclaimable == 2
    pool.attach(node, pool.take())
    pool.clear()
    assert pool.num_cached == 0
    pool.check([])
