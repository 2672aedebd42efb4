"""The prefix tree with window pages beside its pages, against what was written to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from toka_async.arrays import Int32
from toka_async.scheduler.cache.prefix_cache import PageCache
from toka_async.scheduler.cache.prefix_tree import Node
from toka_async.scheduler.cache.window_pool import WindowPool, count_least_pages


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt of whole pages that is being computed. It holds window pages of places `first` to `end`."""

    tokens: Int32
    nodes: list[Node]
    pages: list[int]
    first: int
    end: int
    epoch: int
    computed: int = 0  # tokens


class WindowsMachine(RuleBasedStateMachine):
    """Prompts begin alike, are computed in chunks that end anywhere, and leave at any time."""

    @initialize(
        num_pages=st.integers(12, 40),
        page_size=st.sampled_from([1, 2, 3]),
        window=st.integers(1, 7),
        more=st.integers(0, 8),
    )
    def start(self, num_pages: int, page_size: int, window: int, more: int) -> None:
        num_window_pages = min(num_pages, count_least_pages(window, page_size) + more)
        self.pool = WindowPool(num_pages, page_size, num_window_pages, window)
        self.cache = PageCache(num_pages, page_size, prefix=True, windows=self.pool)
        self.size = page_size
        self.content: dict[int, list[int]] = {}  # of window pages: their tokens, in order
        self.prompts: list[Prompt] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def open(self, tokens: list[int]) -> None:
        each = np.repeat(np.asarray(tokens, np.int32), self.size)
        nodes = self.cache.lookup(np.append(each, np.int32(7)))
        known, _ = self.cache.find_start(nodes)
        pages = [node.page for node in nodes]
        first = self.pool.find_first(known * self.size)
        seen = np.asarray(pages[first:known], np.int32)
        if len(tokens) - len(nodes) > self.cache.num_reclaimable or self.pool.count_new(seen) > (
            self.pool.num_reclaimable
        ):
            self.cache.release(nodes)
            return
        pages += self.cache.take(len(tokens) - len(nodes)).tolist()
        for place in range(first, known):
            written = self.content[int(self.pool.beside[pages[place]])]
            assert written == each[place * self.size : (place + 1) * self.size].tolist(), "a hit without its tokens"
        self.pool.hold(seen)
        self.prompts.append(Prompt(each, nodes, pages, first, known, self.cache.epoch, known * self.size))

    @rule(data=st.data(), count=st.integers(1, 8))
    @precondition(lambda self: self.prompts)
    def compute(self, data: st.DataObject, count: int) -> None:
        prompt = data.draw(st.sampled_from(self.prompts))
        size, left = self.size, np.asarray(prompt.pages[prompt.end :], np.int32)
        room = (prompt.end + self.pool.count_holdable(left)) * size - prompt.computed
        count = min(count, room, prompt.tokens.size - prompt.computed)
        if count <= 0:
            return
        start, prompt.computed = prompt.computed, prompt.computed + count
        end = -(-prompt.computed // size)
        self.pool.hold(np.asarray(prompt.pages[prompt.end : end], np.int32))
        for page, window in self.pool.take_changed().reshape(-1, 2).tolist():
            assert self.pool.beside[page] == window
            self.content[window] = []
        prompt.end = end
        for token in range(start, prompt.computed):
            written = self.content[int(self.pool.beside[prompt.pages[token // size]])]
            if len(written) > token % size:
                assert written[token % size] == prompt.tokens[token], "it is written over with something else"
            else:
                written.append(int(prompt.tokens[token]))
        whole = prompt.computed // size
        self.pool.complete(np.asarray(prompt.pages[start // size : whole], np.int32))
        for place in range(len(prompt.nodes), whole):
            parent = prompt.nodes[-1] if prompt.nodes else None
            tokens = prompt.tokens[place * size : (place + 1) * size]
            node = self.cache.insert(parent, tokens, prompt.pages[place], 0, prompt.epoch)
            if node is None:
                break
            prompt.nodes.append(node)

    @rule(data=st.data())
    @precondition(lambda self: self.prompts)
    def move_on(self, data: st.DataObject) -> None:
        """It gives back what its next token does not see."""
        prompt = data.draw(st.sampled_from(self.prompts))
        first = max(prompt.first, self.pool.find_first(prompt.computed))
        self.pool.drop(np.asarray(prompt.pages[prompt.first : first], np.int32))
        prompt.first = first

    @rule(data=st.data())
    @precondition(lambda self: self.prompts)
    def close(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(self.prompts))
        self.prompts.remove(prompt)
        self.pool.drop(np.asarray(prompt.pages[prompt.first : prompt.end], np.int32))
        self.cache.give(np.asarray(prompt.pages[len(prompt.nodes) :], np.int32))
        self.cache.release(prompt.nodes)

    @rule()
    def begin_epoch(self) -> None:
        self.cache.begin_epoch()
        assert self.pool.num_cached == 0

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        """As when pages of all tokens run short."""
        self.cache.give(self.cache.tree.evict(min(count, self.cache.tree.num_cached)))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check([np.asarray(prompt.pages[len(prompt.nodes) :], np.int32) for prompt in self.prompts])
            held = [page for prompt in self.prompts for page in prompt.pages[prompt.first : prompt.end]]
            self.pool.check(np.asarray(held, np.int32))


TestWindowsMachine = WindowsMachine.TestCase
TestWindowsMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
