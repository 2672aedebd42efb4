"""Finds the prompt runs that share enough pages, and have enough decoding rows, to be computed as a group.

Greedy and depth first, as in Tokasaurus: the deepest shared prefix with enough rows takes them, and the remaining rows
count for the prefixes above it. Each prefix at which runs part counts the rows that no deeper group has. A change walks
up from the run's end while the count changes, and never through the tree. Knows runs by their keys and pages; no
sequences and no row order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import Int32


@dataclass(slots=True, eq=False)
class Branch:
    """A prefix: the `pages` that all runs at or below it share. Runs end here (`keys`) or part.

    num_rows: rows that no deeper group has, at most `min_seqs` of each run. group: the prefix's group, -1 for none. The
    `parent` of a group leads to the prefixes that it shares with others: a second level.
    """

    pages: Int32
    parent: Branch | None
    children: dict[int, Branch] = field(default_factory=dict)  # by the first page that each adds
    keys: set[int] = field(default_factory=set)
    num_rows: int = 0
    group: int = -1

    @property
    def num_left(self) -> int:
        """Rows that count for the prefixes above."""
        return 0 if self.group >= 0 else self.num_rows


class RunTree:
    """The runs that have decoding rows, as a tree of the prefixes at which they part.

    A page is at one place of one prompt, so runs share pages up to the first that differs.

    Args:
        min_seqs: rows of the smallest group.
        min_pages: pages of the shortest prefix of a group, at least 1.
    """

    def __init__(self, min_seqs: int, min_pages: int) -> None:
        assert min_seqs >= 2
        assert min_pages >= 1
        self._min_seqs = min_seqs
        self._min_pages = min_pages
        self._root = Branch(np.empty(0, np.int32), None)
        self._ends: dict[int, Branch] = {}
        self._free_groups: list[int] = []
        self.num_groups = 0
        self.group_of_run = np.empty(0, np.int32)  # by key; -1: none
        self.pages_of_group = np.zeros(16, np.int32)  # by group

    def __contains__(self, key: int) -> bool:
        return key in self._ends

    def reserve(self, num_keys: int) -> None:
        """Make room for keys below `num_keys`."""
        missing = max(0, num_keys - self.group_of_run.size)
        self.group_of_run = np.concatenate([self.group_of_run, np.full(missing, -1, np.int32)])

    def add(self, key: int, pages: Int32) -> None:
        assert key not in self._ends
        branch = self._ends[key] = self._find_end(pages)
        branch.keys.add(key)
        self.group_of_run[key] = _group_above(branch)

    def add_rows(self, key: int, change: int) -> None:
        """Add `change` rows to a run; negative removes rows."""
        branch: Branch | None = self._ends[key]
        while branch is not None and change:
            before = branch.num_left
            branch.num_rows += change
            if (branch.num_rows >= self._min_seqs and branch.pages.size >= self._min_pages) != (branch.group >= 0):
                self._change_group(branch)
            change = branch.num_left - before
            branch = branch.parent

    def remove(self, key: int) -> None:
        branch = self._ends.pop(key)
        branch.keys.remove(key)
        self.group_of_run[key] = -1
        if not branch.keys and not branch.children and branch.parent is not None:
            assert branch.num_rows == 0
            del branch.parent.children[_first_page(branch)]
            branch = branch.parent
        if not branch.keys and len(branch.children) == 1 and branch.parent is not None:
            (child,) = branch.children.values()
            branch.parent.children[_first_page(branch)] = child
            child.parent = branch.parent

    # ---- prefixes

    def _find_end(self, pages: Int32) -> Branch:
        """Find or create the branch where a run with these pages ends."""
        branch = self._root
        while (depth := branch.pages.size) < pages.size:
            first = int(pages[depth])
            child = branch.children.get(first)
            if child is None:
                child = branch.children[first] = Branch(pages, branch)
            elif (num_same := _num_same(child.pages, pages)) < child.pages.size:
                child = _split(child, num_same)
            branch = child
        return branch

    # ---- groups

    def _change_group(self, branch: Branch) -> None:
        """Make a prefix a group, or no group any more, and move the rows at it and ungrouped ones below."""
        if branch.group < 0:
            branch.group = self._take_group(branch.pages.size)
        else:
            self._free_groups.append(branch.group)
            branch.group = -1
            self.num_groups -= 1
        group, below = _group_above(branch), [branch]
        while below:  # these are fewer than min_seqs runs, and the one just added
            part = below.pop()
            self.group_of_run[list(part.keys)] = group
            below.extend(child for child in part.children.values() if child.group < 0)

    def _take_group(self, num_pages: int) -> int:
        group = self._free_groups.pop() if self._free_groups else self.num_groups
        if group >= self.pages_of_group.size:
            self.pages_of_group = np.concatenate([self.pages_of_group, np.zeros(group, np.int32)])
        self.pages_of_group[group] = num_pages
        self.num_groups += 1
        return group

    def check(self) -> None:
        """Assert that counts agree from the leaves up, and that groups are the prefixes with enough rows."""
        groups, below = [], [self._root]
        while below:
            branch = below.pop()
            below.extend(branch.children.values())
            assert branch is self._root or branch.keys or len(branch.children) > 1
            enough = branch.num_rows >= self._min_seqs and branch.pages.size >= self._min_pages
            assert enough == (branch.group >= 0)
            groups += [branch.group] if enough else []
            for first, child in branch.children.items():
                assert child.parent is branch
                assert _first_page(child) == first
                assert _num_same(branch.pages, child.pages) == branch.pages.size < child.pages.size
            assert branch.num_rows >= sum(child.num_left for child in branch.children.values())
            for key in branch.keys:
                assert self._ends[key] is branch
                assert self.group_of_run[key] == _group_above(branch)
        assert len(set(groups)) == len(groups) == self.num_groups
        assert set(np.flatnonzero(self.group_of_run >= 0).tolist()) <= set(self._ends)


def _split(branch: Branch, num_pages: int) -> Branch:
    """Insert a prefix of a branch above it. It is no group, otherwise the branch would be one."""
    parent = branch.parent
    assert parent is not None
    middle = Branch(branch.pages[:num_pages], parent, {int(branch.pages[num_pages]): branch}, num_rows=branch.num_left)
    parent.children[_first_page(branch)] = middle
    branch.parent = middle
    return middle


def _group_above(branch: Branch | None) -> int:
    """The deepest group at or above a branch, -1 if there is none."""
    while branch is not None:
        if branch.group >= 0:
            return branch.group
        branch = branch.parent
    return -1


def _first_page(branch: Branch) -> int:
    """The first page that a branch adds to its parent."""
    assert branch.parent is not None
    return int(branch.pages[branch.parent.pages.size])


def _num_same(a: Int32, b: Int32) -> int:
    size = min(a.size, b.size)
    if size and a[size - 1] == b[size - 1]:
        return size  # a page is at one place of one prompt
    differ = a[:size] != b[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size
