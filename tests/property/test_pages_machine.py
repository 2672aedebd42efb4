"""Free pages and chains of pages against plain lists."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from toka_async.arrays import Int32
from toka_async.scheduler.cache.pages import PageChains, PagePool


class PagesMachine(RuleBasedStateMachine):
    """Owners grow by a page each, several at a time, as rows do, and give all of theirs back."""

    @initialize(num_pages=st.integers(1, 120))
    def start(self, num_pages: int) -> None:
        self.pool, self.chains = PagePool(num_pages), PageChains(num_pages)
        self.owners: dict[int, list[int]] = {}
        self.num_owners = 0

    @rule(count=st.integers(1, 60))
    def open(self, count: int) -> None:
        """New owners without pages."""
        for _ in range(count):
            self.owners[self.num_owners] = []
            self.num_owners += 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        chosen = self.some(data)[: self.pool.num_free]
        pages = self.pool.take(len(chosen))
        self.chains.append(self.heads(chosen), pages)
        for owner, page in zip(chosen, pages.tolist(), strict=True):
            self.owners[owner].append(page)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        chosen = self.some(data)
        pages = self.chains.collect(self.heads(chosen))
        assert sorted(pages.tolist()) == sorted(page for owner in chosen for page in self.owners[owner])
        self.pool.give(pages)
        for owner in chosen:
            del self.owners[owner]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def collect_one(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owners)))
        assert self.chains.collect(self.heads([owner])).tolist() == self.owners[owner][::-1]

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            owned = [page for pages in self.owners.values() for page in pages]
            assert sorted([*owned, *self.pool.free_pages().tolist()]) == list(range(self.pool.num_pages))
            assert self.pool.num_free == self.pool.num_pages - len(owned)

    def some(self, data: st.DataObject) -> list[int]:
        """Some of the owners: one, or all from one on."""
        owners = sorted(self.owners)
        first = data.draw(st.integers(0, len(owners) - 1))
        return owners[first:] if data.draw(st.booleans()) else [owners[first]]

    def heads(self, owners: list[int]) -> Int32:
        return np.asarray([self.owners[owner][-1] if self.owners[owner] else -1 for owner in owners], dtype=np.int32)


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
