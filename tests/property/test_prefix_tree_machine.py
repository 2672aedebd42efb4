"""The prefix tree against a plain dictionary from salts and prefixes to pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from toka_async.arrays import Int32
from toka_async.scheduler.cache.prefix_tree import Node, PrefixTree

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
SALTS = st.sampled_from([0, 0, 1, 1 << 62])

Key = tuple[int, tuple[int, ...]]  # salt, tokens


@dataclass(slots=True)
class Cached:
    """A page of the model."""

    page: int
    num_owners: int
    last_used: int


class PrefixTreeMachine(RuleBasedStateMachine):
    """Prompts are looked up, inserted as far as nobody has them, and left in any order."""

    @initialize(page_size=st.integers(1, 3))
    def start(self, page_size: int) -> None:
        self.size, self.tree = page_size, PrefixTree(page_size)
        self.model: dict[Key, Cached] = {}
        self.owners: list[tuple[list[Key], list[Node]]] = []
        self.num_pages = 0
        self.clock = 0

    @rule(prompt=PROMPTS, max_pages=st.integers(0, 9), salt=SALTS)
    def match(self, prompt: list[int], max_pages: int, salt: int) -> None:
        found = self.tree.match(np.asarray(prompt, np.int32), max_pages, salt)
        assert [node.page for node in found] == [self.model[key].page for key in self.known(prompt, salt)[:max_pages]]

    @rule(prompt=PROMPTS, salt=SALTS)
    def own(self, prompt: list[int], salt: int) -> None:
        """What a run does: own what is there, insert the rest."""
        tokens: Int32 = np.asarray(prompt, np.int32)
        keys = self.known(prompt, salt)
        nodes = self.tree.match(tokens, len(prompt), salt)
        self.tree.acquire(nodes)
        for key in keys:
            self.model[key].num_owners += 1
        for i in range(len(keys), len(prompt) // self.size):
            node = self.tree.insert(
                nodes[-1] if nodes else None, tokens[i * self.size : (i + 1) * self.size], self.num_pages, salt
            )
            assert node is not None
            nodes.append(node)
            keys.append((salt, tuple(prompt[: (i + 1) * self.size])))
            self.model[keys[-1]] = Cached(self.num_pages, 1, 0)
            self.num_pages += 1
        self.owners.append((keys, nodes))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def insert_a_twin(self, data: st.DataObject) -> None:
        keys, nodes = data.draw(st.sampled_from(self.owners))
        if keys:
            salt, tokens = keys[-1]
            last = np.asarray(tokens[-self.size :], np.int32)
            assert self.tree.insert(nodes[-2] if len(nodes) > 1 else None, last, 10**6, salt) is None

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        keys, nodes = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.clock += 1
        for key in keys:
            self.model[key].num_owners -= 1
            self.model[key].last_used = self.clock
        self.tree.release(nodes)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Least recently used first, among the leaves that there are at the time."""
        count = data.draw(st.integers(0, self.tree.num_cached))
        for page in self.tree.evict(count).tolist():
            leaves = [key for key in self.model if self.is_free_leaf(key)]
            (key,) = [key for key in leaves if self.model[key].page == page]
            assert self.model[key].last_used == min(self.model[leaf].last_used for leaf in leaves)
            del self.model[key]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check()
            owned = sum(entry.num_owners > 0 for entry in self.model.values())
            assert (self.tree.num_owned, self.tree.num_cached) == (owned, len(self.model) - owned)
            assert {node.page for node in self.tree.nodes()} == {entry.page for entry in self.model.values()}

    def teardown(self) -> None:
        """Every page can be reclaimed when nobody owns any."""
        if hasattr(self, "tree"):
            for _, nodes in self.owners:
                self.tree.release(nodes)
            pages = self.tree.evict(self.tree.num_cached)
            assert sorted(pages.tolist()) == sorted(entry.page for entry in self.model.values())

    def known(self, prompt: list[int], salt: int) -> list[Key]:
        """Prefixes of whole pages that are cached, up to the first that is not."""
        keys: list[Key] = []
        for end in range(self.size, len(prompt) + 1, self.size):
            if (salt, tuple(prompt[:end])) not in self.model:
                break
            keys.append((salt, tuple(prompt[:end])))
        return keys

    def is_free_leaf(self, key: Key) -> bool:
        salt, tokens = key
        longer = [other for its, other in self.model if its == salt and len(other) > len(tokens)]
        children = [other for other in longer if other[: len(tokens)] == tokens]
        return not children and self.model[key].num_owners == 0


TestPrefixTreeMachine = PrefixTreeMachine.TestCase
TestPrefixTreeMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
