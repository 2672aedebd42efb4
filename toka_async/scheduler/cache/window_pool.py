"""Window pages: where layers with a sliding window keep the keys and values of a page, beside those of other layers.

A page has a window page only while it is of use: as long as somebody may read it, and then, if it is in the prefix
tree, until others need it, least recently used first. Knows page numbers only; a model without windows has none.
"""

from __future__ import annotations

import numpy as np

from toka_async.arrays import Bool, Int32
from toka_async.scheduler.cache.pages import PagePool

NO_PAGES: Int32 = np.empty(0, np.int32)


class WindowPool:
    """A window page is free, or beside one page. That page has users, or it is in the prefix tree, or both.

    beside: int32 [num_pages], each page's window page; -1: it has none.

    Args:
        window: tokens that the layers see, a token itself included.
    """

    def __init__(self, num_pages: int, page_size: int, num_window_pages: int, window: int) -> None:
        assert num_window_pages >= min(num_pages, count_least_pages(window, page_size))
        self.page_size = page_size
        self.window = window
        self.beside = np.full(num_pages, -1, np.int32)
        self._pool = PagePool(num_window_pages)
        self._users = np.zeros(num_pages, np.int32)
        self._in_tree: Bool = np.zeros(num_pages, np.bool_)
        self._is_whole: Bool = np.zeros(num_pages, np.bool_)  # all of the window page's tokens are built into steps
        self._cached: dict[int, None] = {}  # pages without users, least recently used first
        self._changed: list[Int32] = []

    @property
    def num_window_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_reclaimable(self) -> int:
        return self._pool.num_free + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_window_pages - self.num_reclaimable

    def find_first(self, position: int) -> int:
        """Find the place in its sequence of the first page that the token at a position sees."""
        return max(0, position - self.window + 1) // self.page_size

    def find_firsts(self, positions: Int32) -> Int32:
        """Find those of several positions, int32 [n] each."""
        firsts: Int32 = np.maximum(positions - (self.window - 1), 0) // self.page_size
        return firsts

    def count_usable(self, pages: Int32) -> int:
        """Count the leading pages of a prompt after which its next token sees window pages only that are there."""
        ends = np.arange(pages.size + 1, dtype=np.int32)
        is_there = (self.beside[pages] >= 0) & self._is_whole[pages]
        missing = np.concatenate([[0], np.where(is_there, 0, ends[1:])])  # 1 + place of a missing one
        needs_from = self.find_firsts(ends * self.page_size)
        return int(np.flatnonzero(np.maximum.accumulate(missing) <= needs_from)[-1])

    def count_new(self, pages: Int32) -> int:
        """Count the reclaimable window pages that holding these pages takes."""
        return int(np.count_nonzero(self._users[pages] == 0))

    def count_holdable(self, pages: Int32) -> int:
        """Count the leading pages that can be held at once."""
        return int(np.searchsorted(np.cumsum(self._users[pages] == 0), self.num_reclaimable, side="right"))

    def hold(self, pages: Int32, count: int = 1) -> None:
        """Add `count` users to each of distinct pages. Those without a window page get one; the caller knows they can.

        What is not used makes way.
        """
        idle = pages[self._users[pages] == 0]
        if idle.size:
            is_there = self.beside[idle] >= 0
            for page in idle[is_there].tolist():
                del self._cached[page]
            self._take(idle[~is_there])
        self._users[pages] += count

    def _take(self, pages: Int32) -> None:
        while self._pool.num_free < pages.size:
            page = next(iter(self._cached))
            del self._cached[page]
            self._free(np.asarray([page], np.int32))
        self.beside[pages] = self._pool.take(pages.size)
        self._is_whole[pages] = False
        if pages.size:
            self._changed.append(pages)

    def drop(self, pages: Int32) -> None:
        """Remove a user from each of the pages, which may repeat."""
        np.subtract.at(self._users, pages, 1)
        idle = pages[self._users[pages] == 0]
        if idle.size:
            is_kept = self._in_tree[idle] & self._is_whole[idle]
            self._cached.update(dict.fromkeys(idle[is_kept].tolist()))
            self._free(np.unique(idle[~is_kept]))

    def _free(self, pages: Int32) -> None:
        self._pool.give(self.beside[pages])
        self.beside[pages] = -1

    def complete(self, pages: Int32) -> None:
        """Note that all tokens of the pages are built into steps."""
        self._is_whole[pages] = True

    def enter_tree(self, page: int) -> None:
        """Note that a page is in the tree, with all of its tokens."""
        self._in_tree[page] = self._is_whole[page] = True

    def leave_tree(self, page: int) -> None:
        """Note that a page left the tree, which nobody used."""
        self._in_tree[page] = False
        if page in self._cached:
            del self._cached[page]
            self._free(np.asarray([page], np.int32))

    def clear(self) -> None:
        """Free what has no users."""
        if self._cached:
            self._free(np.asarray(list(self._cached), np.int32))
            self._cached.clear()

    def take_changed(self) -> Int32:
        """Take what changed since the last call: pages and their new window pages, int32 [n, 2]."""
        if not self._changed:
            return NO_PAGES
        pages = np.unique(np.concatenate(self._changed))
        self._changed.clear()
        pages = pages[self.beside[pages] >= 0]
        return np.stack([pages, self.beside[pages]], axis=1)

    def check(self, used: Int32) -> None:
        """Assert that counts agree; `used`: the pages of all users, with repeats."""
        self._pool.check()
        assert (np.bincount(used, minlength=self._users.size) == self._users).all()
        there = np.flatnonzero(self.beside >= 0)
        everything = np.concatenate([self._pool.free_pages(), self.beside[there]])
        assert everything.size == np.unique(everything).size == self.num_window_pages
        cached = np.asarray(sorted(self._cached), np.int64)
        assert (there == np.union1d(np.flatnonzero(self._users), cached)).all()
        assert not self._users[cached].any()
        assert (self._in_tree & self._is_whole)[cached].all()


def count_window_span(window: int, page_size: int) -> int:
    """Count the pages that a token can see at most, its own included."""
    return (window + page_size - 2) // page_size + 1


def count_least_pages(window: int, page_size: int) -> int:
    """Count the window pages with which any sequence can run alone: a page to grow, and a prompt's copied tail."""
    return count_window_span(window, page_size) + 2
