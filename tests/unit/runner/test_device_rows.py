"""The device's tables against sequences that are plain Python."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toka_async.runner.device_rows import DecodeInputs, DeviceRows

MAX_SEQS, SCRATCH, NUM_PAGES = 5, 90, 90


@dataclass(slots=True)
class Line:
    """A slot."""

    pages: list[int]
    position: int
    last_token: int


class Tables:
    """`DeviceRows` and what they should hold."""

    def __init__(self, page_size: int, rng: np.random.Generator) -> None:
        self.rows = DeviceRows(MAX_SEQS, page_size, 2, SCRATCH, torch.device("cpu"))
        self.page_size = page_size
        self.rng = rng
        self.lines: dict[int, Line] = {}

    def fill(self, slot: int, position: int) -> None:
        """The slot's row has `position` computed tokens, and pages for a few more."""
        num_pages = position // self.page_size + 3
        pages = self.rng.integers(0, NUM_PAGES, num_pages).tolist()
        line = self.lines[slot] = Line(pages, position, int(self.rng.integers(0, 1000)))
        self.rows.widen(num_pages)
        self.rows.page_table[slot, :num_pages] = torch.tensor(pages)
        self.rows.positions[slot] = position
        self.rows.last_tokens[slot] = line.last_token

    def decode(self, order: list[int], num_padded: int) -> None:
        """A pass of decoding rows, padded; the sampled tokens are 1000 and more."""
        rows = self.rows
        rows.set_order(np.array(order, dtype=np.int32), num_padded)
        num_rows = max(num_padded, len(order))
        inputs = rows.decode_inputs(num_rows)
        self.check(inputs, order, num_rows)
        sampled = torch.from_numpy(self.rng.integers(1000, 2000, num_rows))
        rows.advance(inputs.slots, inputs.contexts)
        rows.set_sampled(inputs.slots, sampled)
        for slot, token in zip(order, sampled.tolist(), strict=False):
            self.lines[slot].position += 1
            self.lines[slot].last_token = token

    def check(self, inputs: DecodeInputs, order: list[int], num_rows: int) -> None:
        lines, padding = [self.lines[slot] for slot in order], num_rows - len(order)
        positions = [line.position for line in lines]
        assert inputs.slots.tolist() == [*order, *[MAX_SEQS] * padding]
        assert inputs.token_ids[: len(order)].tolist() == [line.last_token for line in lines]
        assert inputs.positions.tolist() == [*positions, *[0] * padding]
        assert inputs.contexts.tolist() == [position + 1 for position in inputs.positions.tolist()]
        assert inputs.contexts.dtype == torch.int32
        size = self.page_size
        own = [line.pages[line.position // size] * size + line.position % size for line in lines]
        assert inputs.write_indices.tolist() == [*own, *[SCRATCH * size] * padding]

    def check_tables(self) -> None:
        """Nothing but the rows that decoded has changed."""
        rows = self.rows
        for slot, line in self.lines.items():
            assert rows.page_table[slot, : len(line.pages)].tolist() == line.pages
            assert (int(rows.positions[slot]), int(rows.last_tokens[slot])) == (line.position, line.last_token)
        for slot in set(range(MAX_SEQS)) - self.lines.keys():
            assert not rows.page_table[slot].any()
            assert (int(rows.positions[slot]), int(rows.last_tokens[slot])) == (0, 0)
        assert set(rows.page_table[MAX_SEQS].tolist()) == {SCRATCH}
        assert int(rows.positions[MAX_SEQS]) == 0


SLOTS = st.integers(0, MAX_SEQS - 1)
EVENTS = st.one_of(
    st.tuples(st.just("fill"), SLOTS, st.integers(0, 30)),
    st.tuples(st.just("decode"), st.permutations(range(MAX_SEQS)), st.integers(0, MAX_SEQS), st.integers(1, MAX_SEQS)),
    st.tuples(st.just("widen"), st.integers(1, 70)),
)


@settings(max_examples=40, deadline=None)
@given(page_size=st.sampled_from([1, 3, 16]), events=st.lists(EVENTS, max_size=20), seed=st.integers(0, 99))
def test_random_events(page_size: int, events: list[tuple], seed: int) -> None:  # type: ignore[type-arg]
    tables = Tables(page_size, np.random.default_rng(seed))
    tables.fill(2, 7)
    for event in events:
        match event:
            case ("fill", slot, position):
                tables.fill(slot, position)
            case ("decode", slots, num_rows, num_padded):
                order = [slot for slot in slots if slot in tables.lines][:num_rows]
                # Rows have pages for a few tokens more.
                if all(tables.lines[slot].position // page_size < len(tables.lines[slot].pages) for slot in order):
                    tables.decode(order, num_padded)
            case ("widen", width):
                tables.rows.widen(width)
        tables.check_tables()


def test_padding_alone_writes_only_the_scratch_page() -> None:
    tables = Tables(4, np.random.default_rng(0))
    for _ in range(9):  # more than a page of tokens
        tables.decode([], MAX_SEQS)
        tables.check_tables()


def test_a_table_that_graphs_hold_stays_where_it_is() -> None:
    rows = DeviceRows(MAX_SEQS, 4, 3, SCRATCH, torch.device("cpu"))
    rows.device = torch.device("cuda")
    table = rows.page_table
    rows.widen(3)
    with pytest.raises(AssertionError, match="a row has 4 pages where the table holds 3"):
        rows.widen(4)
    assert rows.page_table is table


def test_widening_grows_by_doubling_and_never_shrinks() -> None:
    rows = DeviceRows(MAX_SEQS, 4, 3, SCRATCH, torch.device("cpu"))
    table = rows.page_table
    rows.widen(3)
    assert rows.page_table is table
    widths = []
    for width in (4, 5, 2, 33):
        rows.widen(width)
        widths.append(rows.page_table.shape[1])
    assert widths == [4, 8, 8, 64]


def test_a_shorter_order_leaves_the_tables_where_they_are() -> None:
    """Graphs read the order where it was when they were captured."""
    rows = DeviceRows(MAX_SEQS, 4, 3, SCRATCH, torch.device("cpu"))
    address = rows.order.data_ptr()
    rows.set_order(np.arange(MAX_SEQS, dtype=np.int32), MAX_SEQS)
    rows.set_order(np.array([3], dtype=np.int32), 2)
    assert rows.order.data_ptr() == address
    assert rows.order.tolist() == [3, MAX_SEQS, 2, 3, 4]
