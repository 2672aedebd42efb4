"""Recurrent states that the ranks keep apart from those of running rows, by number.

A prompt run holds one while its samples start from it. All others belong to nodes of the prefix tree: the state after
the tokens up to the end of the node's page. Those are taken back when others are needed, least recently used first.
Knows numbers only; a model without such states has none.
"""

from __future__ import annotations

from toka_async.scheduler.cache.prefix_tree import Node


class SnapshotPool:
    """A snapshot is free, a node's, or held by whoever took it."""

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._by_node: dict[Node, int] = {}  # least recently used first

    @property
    def num_cached(self) -> int:
        """Snapshots of nodes."""
        return len(self._by_node)

    @property
    def num_held(self) -> int:
        return self.num_snapshots - len(self._free) - len(self._by_node)

    @property
    def num_reclaimable(self) -> int:
        return len(self._free) + len(self._by_node)

    def __contains__(self, node: Node) -> bool:
        return node in self._by_node

    def take(self) -> int:
        """Take a free snapshot, or a node's; -1 if all are held."""
        if not self._free and self._by_node:
            self.drop(next(iter(self._by_node)))
        return self._free.pop() if self._free else -1

    def give(self, snapshot: int) -> None:
        self._free.append(snapshot)

    def use(self, node: Node) -> int:
        """Find a node's snapshot, which is the most recently used one then."""
        snapshot = self._by_node[node] = self._by_node.pop(node)
        return snapshot

    def attach(self, node: Node, snapshot: int) -> None:
        """Give a snapshot that was taken to a node, unless it has one."""
        if node in self._by_node:
            self.give(snapshot)
        else:
            self._by_node[node] = snapshot

    def detach(self, node: Node) -> int:
        """Take a node's own snapshot."""
        return self._by_node.pop(node)

    def drop(self, node: Node) -> None:
        """Free a node's snapshot, if it has one."""
        snapshot = self._by_node.pop(node, -1)
        if snapshot >= 0:
            self._free.append(snapshot)

    def clear(self) -> None:
        """Free the snapshots of all nodes."""
        self._free.extend(self._by_node.values())
        self._by_node.clear()

    def check(self, held: list[int]) -> None:
        """Assert that every snapshot is in one place; `held`: those that were taken."""
        everything = [*self._free, *self._by_node.values(), *held]
        assert sorted(everything) == list(range(self.num_snapshots)), everything
        assert all(node.parent is not None for node in self._by_node), "a node has left the tree with its snapshot"
