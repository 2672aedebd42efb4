"""Groups of decoding rows with a shared prefix, which attention reads once (Hydragen, arXiv:2402.05099).

Finds the stretches of a row order that are groups, and a better order when too many rows lie apart from their group.
Depends only on the rows it is given: each part of a batch has a `Grouping` of its own. Knows the run of each row; not
the sequence table, nor slots.
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

# The share of rows that may lie apart from their group and do without it: a new order is four bytes a row.
APART = 1 / 64


@dataclass(slots=True, frozen=True)
class GroupColumns:
    """First row, number of rows and number of shared leading pages of each group, in row order.

    num_spared: pages that rows do not read because their group does, over all rows.
    """

    starts: memoryview = EMPTY
    rows: memoryview = EMPTY
    pages: memoryview = EMPTY
    num_spared: int = 0


NO_GROUPS = GroupColumns()


@dataclass(slots=True)
class Stretches:
    """Maximal stretches of neighbouring rows of one group, in row order."""

    starts: Int64
    lengths: Int64
    groups: Int32

    def select(self, which: Intp) -> Stretches:
        return Stretches(self.starts[which], self.lengths[which], self.groups[which])

    def select_longest(self) -> Stretches:
        order = np.lexsort((self.lengths, self.groups))
        ordered = self.groups[order]
        last = np.append(ordered[1:] != ordered[:-1], True)
        return self.select(np.sort(order[last]))


class Grouping:
    """The groups of one set of decoding rows, kept from step to step.

    columns: for the step's message; valid until the rows change. wants_order: too many rows lie apart from their group,
    and no better order was computed.

    Args:
        min_seqs: rows of the smallest group, at least 2.
        min_pages: pages of the shortest shared prefix, at least 1.
    """

    def __init__(self, min_seqs: int, min_pages: int) -> None:
        self._min_seqs = min_seqs
        self._min_pages = min_pages
        self._tree = RunTree(min_seqs, min_pages)
        self._counts: Int64 = np.zeros(0, np.int64)  # rows of each run, at most min_seqs
        self.columns = NO_GROUPS
        self.wants_order = False

    def update(self, keys: Int32, runs: Mapping[int, PromptRun], reorder: bool = True) -> Intp | None:
        """Update the groups after the rows changed; returns a better order of the rows, as indices, if there is one.

        Args:
            keys: keys of the rows' runs, in row order, [rows].
            runs: at least the runs of the rows, by key.
            reorder: look for a better order; otherwise rows that lie apart from their group stay there.
        """
        self._count(keys, runs)
        tree = self._tree
        self.wants_order = False
        if not tree.num_groups:
            self.columns = NO_GROUPS
            return None
        groups, order = tree.group_of_run.take(keys), None
        stretches = _find_stretches(groups)
        longest = stretches.select_longest()
        self.wants_order = stretches.lengths.sum() - longest.lengths.sum() > APART * groups.size
        if self.wants_order and reorder:
            order = _order_by_group(groups, stretches)
            longest = _find_stretches(groups[order])
            self.wants_order = False
        groups_now = longest.select(np.flatnonzero(longest.lengths >= self._min_seqs))
        pages = tree.pages_of_group[groups_now.groups]
        self.columns = GroupColumns(
            i32_column(groups_now.starts.astype(np.int32)),
            i32_column(groups_now.lengths.astype(np.int32)),
            i32_column(pages),
            num_spared=int(((groups_now.lengths - 1) * pages).sum()),
        )
        return order

    def _count(self, keys: Int32, runs: Mapping[int, PromptRun]) -> None:
        """Tell the tree how the rows of each run changed, as far as that can change a group."""
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
                tree.add_rows(key, new - old)
                if not new:
                    tree.remove(key)
        self._counts = counts

    def check(self) -> None:
        self._tree.check()


def _find_stretches(groups: Int32) -> Stretches:
    """Find the stretches of rows with these groups, at least one row, -1 for no group."""
    starts = np.concatenate([[0], np.flatnonzero(groups[1:] != groups[:-1]) + 1])
    lengths = np.diff(starts, append=groups.size)
    every = Stretches(starts, lengths, groups[starts])
    return every.select(np.flatnonzero(every.groups >= 0))


def _order_by_group(groups: Int32, stretches: Stretches) -> Intp:
    """Order rows without a group first, then by group, the last row's group last: rows that join continue it."""
    ends: Int64 = np.zeros(int(stretches.groups.max()) + 2, np.int64)
    ends[stretches.groups] = stretches.starts + stretches.lengths  # the last assignment of a group stays
    return ends[groups].argsort(kind="stable")
