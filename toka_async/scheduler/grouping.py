"""Groups of decoding rows with a shared prefix, for attention that reads it once (Hydragen, arXiv:2402.05099).

Tells which stretches of a given row order are groups, and a better order when too many rows lie apart from theirs.
A function of the rows it is given: the rows of a batch's part are grouped by a `Grouping` of their own. Knows which
run each row stands on; no lanes' tables, no slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from toka_async.arrays import EMPTY, Int32, Int64, i32_column
from toka_async.scheduler.run_tree import RunTree
from toka_async.scheduler.sequences.requests import PromptRun

Intp = npt.NDArray[np.intp]

# Of the rows may lie apart from their group, and go without it: every new order is four bytes a row.
APART = 1 / 64


@dataclass(slots=True, frozen=True)
class GroupColumns:
    """Of each group, in row order: first row, rows, leading pages that they share."""

    starts: memoryview = EMPTY
    rows: memoryview = EMPTY
    pages: memoryview = EMPTY


NO_GROUPS = GroupColumns()


@dataclass(slots=True)
class Stretches:
    """Neighbouring rows of one group, as long as they can be, in row order."""

    starts: Int64
    lengths: Int64
    groups: Int32

    def chosen(self, which: Intp) -> Stretches:
        return Stretches(self.starts[which], self.lengths[which], self.groups[which])

    def longest(self) -> Stretches:
        """The longest of each group."""
        order = np.lexsort((self.lengths, self.groups))
        ordered = self.groups[order]
        last = np.append(ordered[1:] != ordered[:-1], True)
        return self.chosen(np.sort(order[last]))


class Grouping:
    """The groups of one set of decoding rows, kept from step to step.

    columns: for the step's message; they hold until the rows change. wants_order: too many rows lie apart from their
    group; a better order was not looked for.

    Args:
        min_seqs: rows of the smallest group, at least 2.
        min_pages: pages of the shortest shared prefix, at least 1.
    """

    def __init__(self, min_seqs: int, min_pages: int) -> None:
        self._min_seqs = min_seqs
        self._min_pages = min_pages
        self._tree = RunTree(min_seqs, min_pages)
        self._counts: Int64 = np.zeros(0, np.int64)  # rows of each run, min_seqs for more than that
        self.columns = NO_GROUPS
        self.wants_order = False

    def update(self, keys: Int32, runs: Mapping[int, PromptRun], reorder: bool = True) -> Intp | None:
        """The rows have changed; returns an order in which they lie better, as indices of rows, if there is one.

        Args:
            keys: of the row's runs, in row order, [rows].
            runs: by key; those of the rows.
            reorder: look for a better order; without, rows that lie apart from their group stay there.
        """
        self._count(keys, runs)
        tree = self._tree
        self.wants_order = False
        if not tree.num_groups:
            self.columns = NO_GROUPS
            return None
        groups, order = tree.group_of_run.take(keys), None
        stretches = _stretches(groups)
        longest = stretches.longest()
        self.wants_order = stretches.lengths.sum() - longest.lengths.sum() > APART * groups.size
        if self.wants_order and reorder:
            order = _together(groups, stretches)
            longest = _stretches(groups[order])
            self.wants_order = False
        groups_now = longest.chosen(np.flatnonzero(longest.lengths >= self._min_seqs))
        self.columns = GroupColumns(
            i32_column(groups_now.starts.astype(np.int32)),
            i32_column(groups_now.lengths.astype(np.int32)),
            i32_column(tree.pages_of_group[groups_now.groups]),
        )
        return order

    def _count(self, keys: Int32, runs: Mapping[int, PromptRun]) -> None:
        """Tell the tree of the runs whose rows became more or fewer, as far as that can change a group."""
        counts = np.minimum(np.bincount(keys, minlength=self._counts.size), self._min_seqs)
        if counts.size > self._counts.size:
            self._counts = np.concatenate([self._counts, np.zeros(counts.size - self._counts.size, np.int64)])
            self._tree.reserve(counts.size)
        tree, changed = self._tree, np.flatnonzero(counts != self._counts)
        before, after = self._counts[changed].tolist(), counts[changed].tolist()
        for key, old, new in zip(changed.tolist(), before, after, strict=True):
            if not old and (pages := runs[key].pages).size >= self._min_pages:
                tree.add(key, pages)
            if key in tree:
                tree.count(key, new - old)
                if not new:
                    tree.remove(key)
        self._counts = counts

    def check(self) -> None:
        self._tree.check()


def _stretches(groups: Int32) -> Stretches:
    """Of rows whose groups are given, -1 for none; at least one row."""
    starts = np.concatenate([[0], np.flatnonzero(groups[1:] != groups[:-1]) + 1])
    lengths = np.diff(starts, append=groups.size)
    every = Stretches(starts, lengths, groups[starts])
    return every.chosen(np.flatnonzero(every.groups >= 0))


def _together(groups: Int32, stretches: Stretches) -> Intp:
    """Rows without a group first, then group after group, last the one that has the last row: rows that join it
    continue it."""
    ends: Int64 = np.zeros(int(stretches.groups.max()) + 2, np.int64)
    ends[stretches.groups] = stretches.starts + stretches.lengths  # of a group's stretches the last one stays
    return ends[groups].argsort(kind="stable")
