from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toka_async.arrays import Int32
from toka_async.scheduler.run_tree import RunTree

Groups = set[tuple[tuple[int, ...], frozenset[int]]]  # shared pages, keys of its runs


def naive_groups(rows: dict[int, tuple[tuple[int, ...], int]], min_seqs: int, min_pages: int) -> Groups:
    """The greedy rule on the rows themselves; `rows` are pages and counts by key."""
    groups: Groups = set()
    left = dict(rows)
    for depth in range(max((len(pages) for pages, _ in rows.values()), default=0), min_pages - 1, -1):
        sharing: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for key, (pages, _) in left.items():
            if len(pages) >= depth:
                sharing[pages[:depth]].add(key)
        for pages, keys in sharing.items():
            if sum(left[key][1] for key in keys) >= min_seqs:
                groups.add((pages, frozenset(keys)))
                for key in keys:
                    del left[key]
    return groups


def kept_groups(tree: RunTree, rows: dict[int, tuple[tuple[int, ...], int]]) -> Groups:
    """The same of a tree."""
    keys_of: defaultdict[int, set[int]] = defaultdict(set)
    for key in rows:
        keys_of[int(tree.group_of_run[key])].add(key)
    keys_of.pop(-1, None)
    assert len(keys_of) == tree.num_groups
    first = {group: rows[min(keys)][0] for group, keys in keys_of.items()}
    return {(first[group][: tree.pages_of_group[group]], frozenset(keys)) for group, keys in keys_of.items()}


def pages_of(path: list[int], numbers: dict[tuple[int, ...], int]) -> tuple[int, ...]:
    """Pages of a prompt: one number for each prefix."""
    return tuple(numbers.setdefault(tuple(path[: i + 1]), 100 + len(numbers)) for i in range(len(path)))


def array(pages: tuple[int, ...]) -> Int32:
    return np.asarray(pages, np.int32)


@given(
    min_seqs=st.integers(2, 5),
    min_pages=st.integers(1, 3),
    changes=st.lists(
        st.tuples(st.integers(0, 11), st.lists(st.integers(0, 2), max_size=6), st.integers(0, 6)), max_size=40
    ),
)
def test_groups_kept_equal_groups_found_anew(
    min_seqs: int, min_pages: int, changes: list[tuple[int, list[int], int]]
) -> None:
    tree, numbers = RunTree(min_seqs, min_pages), dict[tuple[int, ...], int]()
    rows: dict[int, tuple[tuple[int, ...], int]] = {}
    tree.reserve(12)
    for key, path, count in changes:
        pages, before = rows.pop(key, (pages_of(path, numbers), 0))
        if count and not before:
            tree.add(key, array(pages))
        if count or before:
            tree.add_rows(key, min(count, min_seqs) - min(before, min_seqs))
        if before and not count:
            tree.remove(key)
        if count:
            rows[key] = (pages, count)
        tree.check()
        assert kept_groups(tree, rows) == naive_groups(rows, min_seqs, min_pages)


def test_the_deepest_prefix_with_enough_rows_has_them() -> None:
    tree = RunTree(min_seqs=4, min_pages=1)
    tree.reserve(4)
    for key, pages, count in ((0, (1, 2, 3), 4), (1, (1, 2, 4), 3), (2, (1, 5), 1), (3, (6, 7), 3)):
        tree.add(key, array(pages))
        tree.add_rows(key, count)
    assert tree.pages_of_group[tree.group_of_run[:3]].tolist() == [3, 1, 1]
    assert tree.group_of_run[3] == -1
    tree.add_rows(0, -1)  # three and three meet where both runs still share
    assert tree.pages_of_group[tree.group_of_run[:2]].tolist() == [2, 2]
    assert tree.group_of_run[2] == -1
    tree.check()


def test_a_run_that_joins_or_leaves_walks_up_its_own_path_only() -> None:
    """What hangs on other branches of a prefix is not looked at, however much there is."""
    tree = RunTree(min_seqs=2, min_pages=1)
    tree.reserve(1002)
    for key in range(1000):
        tree.add(key, array((1, 10 + key)))
        tree.add_rows(key, 1)
    others = tree._ends[5].parent
    assert others is not None
    assert others.group >= 0

    class Untouched(dict[int, object]):
        def values(self) -> object:  # type: ignore[override]
            raise AssertionError("a walk through the tree")

    others.children = Untouched(others.children)  # type: ignore[assignment]
    tree.add(1001, array((1, 5000)))
    tree.add_rows(1001, 1)
    assert tree.group_of_run[1001] == others.group
    tree.add_rows(1001, -1)
    tree.remove(1001)
    assert tree.num_groups == 1
