"""The prefix tree: full pages of prompts by their tokens, with owners, evicted least recently used first.

One node a page. Whoever owns a node owns its ancestors, so unowned nodes have only unowned descendants, and every
unowned page can be reclaimed. Prompts of different salts or epochs share nothing: both are part of the key of the first
page.
Knows tokens and page numbers; not requests, nor whether a page's content is computed (the scheduler inserts a page with
the step that fills it, and ranks run steps in order).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import Int32

SALT_BYTES = 16  # of a salt and an epoch


@dataclass(slots=True, eq=False)
class Node:
    """A full page. key: its tokens, after the salt in the first page of a prompt."""

    page: int
    key: bytes
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    num_owners: int = 0
    last_used: int = 0


Offer = tuple[int, int, Node]  # last use, serial number, a leaf without owners


class PrefixTree:
    """Pages by the tokens they hold, with counts of owned and of cached (unowned) pages."""

    def __init__(self, page_size: int, on_evict: Callable[[Node], None] = lambda _: None) -> None:
        """on_evict: called with each node that leaves the tree."""
        self._page_size = page_size
        self._on_evict = on_evict
        self._root = Node(page=-1, key=b"", parent=None, num_owners=1)
        self._clock = 0
        self._serial = 0
        self._evictable: list[Offer] = []
        self.num_owned = 0
        self.num_cached = 0

    def match(self, tokens: Int32, max_pages: int, salt: int = 0, epoch: int = 0) -> list[Node]:
        """Find the longest chain of nodes of a salt and epoch that holds the first tokens, of at most `max_pages`."""
        node, nodes, width = self._root, [], 4 * self._page_size
        data, before = tokens.tobytes(), _salt_key(salt, epoch)
        for i in range(min(max_pages, tokens.size // self._page_size)):
            child = node.children.get(before + data[i * width : (i + 1) * width])
            if child is None:
                break
            nodes.append(child)
            node, before = child, b""
        return nodes

    def acquire(self, nodes: Sequence[Node]) -> None:
        """Become an owner of a chain of nodes that starts at the root."""
        for node in nodes:
            if node.num_owners == 0:
                self.num_cached -= 1
                self.num_owned += 1
            node.num_owners += 1

    def release(self, nodes: Sequence[Node]) -> None:
        """Stop owning a chain of nodes that starts at the root; the pages stay cached until they are evicted."""
        self._clock += 1
        for node in reversed(nodes):
            assert node.num_owners > 0
            node.num_owners -= 1
            node.last_used = self._clock
            if node.num_owners == 0:
                self.num_owned -= 1
                self.num_cached += 1
                if not node.children:
                    self._offer(node)

    def insert(self, parent: Node | None, tokens: Int32, page: int, salt: int = 0, epoch: int = 0) -> Node | None:
        """Add a node of `tokens` (one page) below `parent` (None: the root), owned by the caller.

        Returns None if the tree already has such a node; `page` then stays the caller's.
        """
        above = parent or self._root
        assert above.num_owners > 0
        key = tokens.tobytes() if parent else _salt_key(salt, epoch) + tokens.tobytes()
        if key in above.children:
            return None
        node = above.children[key] = Node(page=page, key=key, parent=above, num_owners=1)
        self.num_owned += 1
        return node

    def evict(self, count: int) -> Int32:
        """Remove `count` unowned pages, least recently used first, leaves before their parents."""
        assert count <= self.num_cached
        pages: list[int] = []
        while len(pages) < count:
            entry = heapq.heappop(self._evictable)
            if not _is_valid(entry):
                continue
            node = entry[2]
            pages.append(node.page)
            self._on_evict(node)
            parent, node.parent = node.parent, None
            assert parent is not None
            del parent.children[node.key]
            if parent.num_owners == 0 and not parent.children:
                self._offer(parent)
        self.num_cached -= count
        return np.asarray(pages, dtype=np.int32)

    def _offer(self, node: Node) -> None:
        if len(self._evictable) > 2 * self.num_cached + 64:  # most offers are outdated
            self._evictable = [entry for entry in self._evictable if _is_valid(entry)]
            heapq.heapify(self._evictable)
        self._serial += 1
        heapq.heappush(self._evictable, (node.last_used, self._serial, node))

    def nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        nodes = list(self.nodes())
        assert len({node.page for node in nodes}) == len(nodes)
        assert sum(node.num_owners > 0 for node in nodes) == self.num_owned
        assert sum(node.num_owners == 0 for node in nodes) == self.num_cached
        offered = {id(entry[2]) for entry in self._evictable if _is_valid(entry)}
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[node.key] is node
            assert node.num_owners == 0 or node.parent.num_owners > 0
            num_salt = len(node.key) - 4 * self._page_size
            assert num_salt == 0 or (num_salt == SALT_BYTES and node.parent is self._root)
            assert node.num_owners or node.children or id(node) in offered


def _salt_key(salt: int, epoch: int) -> bytes:
    """The beginning of a first page's key: empty where both are 0."""
    return (salt | epoch << 64).to_bytes(SALT_BYTES, "little") if salt or epoch else b""


def _is_valid(offer: Offer) -> bool:
    """The node is still a leaf without owners, not used since it was offered."""
    last_used, _, node = offer
    return not node.num_owners and not node.children and node.parent is not None and node.last_used == last_used
