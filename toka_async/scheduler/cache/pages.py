"""Free pages of the KV cache, and the chains of pages that running sequences own.

Knows page numbers only: not what is in a page, nor who shares it.
"""

from __future__ import annotations

import numpy as np

from toka_async.arrays import Int32

FEW = 32  # chains up to which a loop is faster than array operations


class PagePool:
    """A stack of free pages. A page is either here or somewhere else, never both."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        return self._num_free

    def take(self, count: int) -> Int32:
        """Take `count` pages; the caller has checked that they are free."""
        assert 0 <= count <= self._num_free
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def give(self, pages: Int32) -> None:
        assert self._num_free + pages.size <= self.num_pages
        self._free[self._num_free : self._num_free + pages.size] = pages
        self._num_free += pages.size

    def free_pages(self) -> Int32:
        return self._free[: self._num_free]

    def check(self) -> None:
        free = self.free_pages()
        assert np.unique(free).size == free.size
        assert free.size == 0 or (free.min() >= 0 and free.max() < self.num_pages)


class PageChains:
    """The pages of each owner, as chains through one column: page -> the owner's page before it.

    The caller knows an owner by its newest page (`heads`); -1 ends a chain. Memory is four bytes a page, however pages
    are spread over owners.
    """

    def __init__(self, num_pages: int) -> None:
        self._previous = np.full(num_pages, -1, dtype=np.int32)

    def append(self, heads: Int32, pages: Int32) -> None:
        """Put pages[i] in front of the chain heads[i] (-1: a new chain). The pages are the new heads."""
        self._previous[pages] = heads

    def cut(self, pages: Int32, count: int) -> None:
        """Take the first `count` pages off a chain, given all of its pages, oldest first."""
        if count < pages.size:
            self._previous[pages[count]] = -1

    def collect(self, heads: Int32) -> Int32:
        """Collect all pages of the chains, newer pages of a chain before its older ones."""
        parts = [np.empty(0, np.int32)]
        current = heads[heads >= 0]
        while current.size > FEW:
            parts.append(current)
            current = self._previous[current]
            current = current[current >= 0]
        rest, previous = [], self._previous.data
        for page in current.tolist():
            while page >= 0:
                rest.append(page)
                page = previous[page]
        return np.concatenate([*parts, np.asarray(rest, dtype=np.int32)])
