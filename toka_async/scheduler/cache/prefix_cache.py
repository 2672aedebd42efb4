"""The pages that the scheduler gives out.

Every page is in exactly one place: free, in the prefix tree, owned by a sequence (its chain), or owned by a prompt run.
Knows no steps and no requests.
"""

from __future__ import annotations

import numpy as np

from toka_async.arrays import Int32
from toka_async.scheduler.cache.pages import PageChains, PagePool
from toka_async.scheduler.cache.prefix_tree import Node, PrefixTree
from toka_async.scheduler.cache.snapshots import SnapshotPool
from toka_async.scheduler.cache.window_pool import WindowPool


class PageCache:
    """The pool, the prefix tree and the chains of one replica's KV cache, and what is kept beside pages of the tree.

    The spine of a prompt is its pages. Beside them are snapshots of recurrent states, or window pages, which can be
    dropped: a prompt then begins at the last place where it finds what its next token needs.

    epoch: new prompts share pages with those that were opened in the same epoch. windows: None: layers see all tokens.
    """

    def __init__(
        self, num_pages: int, page_size: int, prefix: bool, num_snapshots: int = 0, windows: WindowPool | None = None
    ) -> None:
        self.page_size = page_size
        self.prefix = prefix
        self.pool = PagePool(num_pages)
        self.snapshots = SnapshotPool(num_snapshots)
        self.windows = windows
        self.tree = PrefixTree(page_size, self._drop_beside)
        self.chains = PageChains(num_pages)
        self.epoch = 0

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_reclaimable(self) -> int:
        """Pages that are free or cached without an owner."""
        return self.pool.num_free + self.tree.num_cached

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_reclaimable

    def take(self, count: int) -> Int32:
        """Take `count` of the reclaimable pages; evicts cached pages when too few are free."""
        short = count - self.pool.num_free
        if short > 0:
            self.pool.give(self.tree.evict(short))
        return self.pool.take(count)

    def give(self, pages: Int32) -> None:
        self.pool.give(pages)

    def lookup(self, tokens: Int32, salt: int = 0) -> list[Node]:
        """Acquire the longest cached prefix of a salt that leaves at least one token to compute."""
        if not self.prefix:
            return []
        nodes = self.tree.match(tokens, (tokens.size - 1) // self.page_size, salt, self.epoch)
        self.tree.acquire(nodes)
        return nodes

    def insert(self, parent: Node | None, tokens: Int32, page: int, salt: int, epoch: int) -> Node | None:
        """Add a page to the tree, see `PrefixTree.insert`."""
        node = self.tree.insert(parent, tokens, page, salt, epoch)
        if node is not None and self.windows is not None:
            self.windows.enter_tree(page)
        return node

    def _drop_beside(self, node: Node) -> None:
        self.snapshots.drop(node)
        if self.windows is not None:
            self.windows.leave_tree(node.page)

    def find_start(self, nodes: list[Node]) -> tuple[int, int]:
        """Find how many of a prompt's nodes need not be computed, and the snapshot of the state behind them, or -1.

        A model without recurrent states needs none.
        """
        if self.windows is not None:
            return self.windows.count_usable(np.asarray([node.page for node in nodes], np.int32)), -1
        if not self.snapshots.num_snapshots:
            return len(nodes), -1
        for count in range(len(nodes), 0, -1):
            if nodes[count - 1] in self.snapshots:
                return count, self.snapshots.use(nodes[count - 1])
        return 0, -1

    def begin_epoch(self) -> None:
        """New prompts find nothing of earlier ones from now on. Owned pages stay with their owners."""
        self.epoch += 1
        self.snapshots.clear()
        if self.windows is not None:
            self.windows.clear()
        self.pool.give(self.tree.evict(self.tree.num_cached))

    def release(self, nodes: list[Node]) -> None:
        self.tree.release(nodes)

    def check(self, owned: list[Int32]) -> None:
        """Assert that free pages, the tree's and `owned` (by sequences and prompt runs) are all pages, each once."""
        self.pool.check()
        self.tree.check()
        in_tree = np.asarray([node.page for node in self.tree.nodes()], dtype=np.int32)
        everything = np.concatenate([self.pool.free_pages(), in_tree, *owned])
        assert everything.size == self.num_pages, f"{everything.size} pages of {self.num_pages}"
        assert np.unique(everything).size == self.num_pages
