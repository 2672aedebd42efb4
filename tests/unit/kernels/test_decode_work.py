"""Every key has one program, whatever rows' lengths are, and no program has much more than the others."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton")

from toka_async.kernels.decode_work import MOST_PARTS, DecodeWork, divide_alike, divide_keys, needs_parts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = 200 if DEVICE.type == "cuda" else 10  # the interpreter is slow
LENGTHS = st.lists(st.one_of(st.integers(1, 60), st.integers(1, 3000), st.just(100_000)), min_size=1, max_size=40)


def divided(
    lengths: list[int], num_programs: int, skip: list[int] | None = None, window: int = 0, is_split: bool = True
) -> DecodeWork:
    contexts, leading = (None if x is None else torch.tensor(x, dtype=torch.int32).to(DEVICE) for x in (lengths, skip))
    assert contexts is not None
    return divide_keys(contexts, len(lengths), leading, window, num_programs, is_split)


def parts_of(work: DecodeWork) -> dict[int, int]:
    """The parts of each row in the order in which rows start; all of a row's parts are there, one after the other."""
    items = [tuple(item) for item in work.items.tolist()]
    used = [item for item in items if item[0] >= 0]
    assert items[: len(used)] == used
    parts = {row: count for row, _, count in used}
    assert used == [(row, part, count) for row, count in parts.items() for part in range(count)]
    return parts


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    lengths=LENGTHS,
    num_programs=st.sampled_from([1, 5, 82, 198]),
    skip=st.one_of(st.none(), st.integers(0, 50)),
    window=st.sampled_from([0, 0, 400]),
    is_split=st.booleans(),
)
def test_rows_with_the_most_keys_start_first_and_are_divided_evenly(
    lengths: list[int], num_programs: int, skip: int | None, window: int, is_split: bool
) -> None:
    skips = None if skip is None else [min(skip, length - 1) for length in lengths]
    work = divided(lengths, num_programs, skips, window, is_split)
    own = [
        min(length, window) if window and length > window else length - (skips[row] if skips else 0)
        for row, length in enumerate(lengths)
    ]
    parts = parts_of(work)
    assert list(parts) == sorted(range(len(own)), key=lambda row: (-own[row], row))
    if not is_split:
        assert set(parts.values()) == {1}
        return
    equal = max(sum(own) / num_programs, 256)
    for row, count in parts.items():
        assert count == MOST_PARTS or own[row] / count <= equal + 64
        assert count == 1 or own[row] / count >= 32
    needed = [(row, count) for row, count in parts.items() if count > 1]
    assert sum(count for _, count in needed) <= work.num_partials <= 4 * num_programs
    merged = [entry for entry in work.merged.tolist() if entry[2]]
    assert [(row, count) for row, _, count in merged] == needed
    items = work.items.tolist()
    assert all(items[first][:2] == [row, 0] for row, first, _ in merged)
    assert bool(needed) <= needs_parts(max(own), sum(own), len(own), num_programs)


def test_a_long_row_beside_short_ones_has_most_of_the_programs() -> None:
    parts = parts_of(divided([500] * 30 + [100_000] + [500] * 33, 198))
    assert parts.pop(30) == MOST_PARTS
    assert set(parts.values()) == {2}


def test_even_rows_have_a_program_for_each_at_once() -> None:
    work = divided([1200] * 64, 198)
    assert set(parts_of(work).values()) == {3}  # 192 of 198
    assert len(work.items) == 64 + 2 * 198  # whatever the lengths are


def test_rows_without_keys_have_no_part() -> None:
    assert list(parts_of(divided([0, 5, 0, 700, 0], 4))) == [3, 1]


def test_more_rows_than_a_program_compares_at_once() -> None:
    lengths = torch.randint(1, 5000, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    parts = parts_of(divided(lengths, 198))
    assert list(parts) == sorted(range(700), key=lambda row: (-lengths[row], row))


def test_parts_alike() -> None:
    work = divide_alike(3, 4, 64, DEVICE)
    assert list(parts_of(work).items()) == [(0, 4), (1, 4), (2, 4)]
    assert work.merged.tolist() == [[0, 0, 4], [1, 4, 4], [2, 8, 4]]
    assert (work.least, work.num_partials) == (64, 12)


def test_rows_that_fill_the_chip_need_no_parts() -> None:
    assert not needs_parts(96, 96 * 8192, 8192, 198)
    assert not needs_parts(100, 100, 1, 198)
    assert needs_parts(8000, 8000, 1, 198)
    assert needs_parts(8000, 8000 + 500 * 1000, 1001, 198)
