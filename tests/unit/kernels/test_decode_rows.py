from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton")

from toka_async.kernels.decode_rows import NEXT_TOKEN, begin_rows
from toka_async.runner.device_rows import DeviceRows
from toka_async.runner.token_history import TokenHistory

NUM_PAGES = 3000


def make_rows(device: torch.device, max_seqs: int, page_size: int, width: int) -> tuple[DeviceRows, TokenHistory]:
    """Tables of rows that are anywhere in pages of their own."""
    rng = np.random.default_rng(max_seqs)
    rows = DeviceRows(max_seqs, page_size, width, NUM_PAGES, device)
    rows.page_table[:max_seqs] = torch.from_numpy(rng.permutation(NUM_PAGES)[: max_seqs * width].reshape(max_seqs, -1))
    rows.positions[:max_seqs] = torch.from_numpy(rng.integers(0, page_size * width, max_seqs))
    rows.last_tokens[:] = torch.from_numpy(rng.integers(0, 100_000, max_seqs + 1))
    return rows, TokenHistory(NUM_PAGES + 1, page_size, device)


@pytest.mark.parametrize(("num_rows", "num_padded", "page_size"), [(1, 1, 16), (5, 8, 1), (0, 3, 16), (290, 300, 5)])
@pytest.mark.parametrize("keeps", [False, True])
def test_it_equals_plain_torch(
    device: torch.device, num_rows: int, num_padded: int, page_size: int, keeps: bool
) -> None:
    expected, expected_history = make_rows(device, num_padded + 3, page_size, 9)
    actual, history = make_rows(device, num_padded + 3, page_size, 9)
    order = np.random.default_rng(0).permutation(num_padded + 3)[:num_rows].astype(np.int32)
    for rows in (expected, actual):
        rows.set_order(order, num_padded)
    inputs = expected.decode_inputs(num_padded)
    expected.advance(inputs.slots, inputs.contexts)
    if keeps:
        # Of padding, any row's token stays in the page that no row owns.
        expected_history.write(inputs.write_indices, inputs.token_ids)
    begun = begin_rows(
        actual.order[:num_padded],
        actual.last_tokens,
        actual.positions,
        actual.page_table,
        page_size,
        history.ids if keeps else None,
    )
    columns = inputs.token_ids, inputs.positions, inputs.write_indices, inputs.contexts
    for column, exact in zip(begun, columns, strict=True):
        assert column.dtype == exact.dtype
        assert torch.equal(column, exact)
    assert torch.equal(actual.positions, expected.positions)
    assert torch.equal(actual.last_tokens, expected.last_tokens)
    assert torch.equal(history.ids, expected_history.ids)


@pytest.mark.parametrize("page_size", [1, 16])
def test_given_tokens_equal_plain_torch(device: torch.device, page_size: int) -> None:
    """Of decoding rows, of chunks that lie in one program and in several, and of padding."""
    max_seqs = 18
    expected, expected_history = make_rows(device, max_seqs, page_size, 160 // page_size)
    actual, history = make_rows(device, max_seqs, page_size, 160 // page_size)
    rng = np.random.default_rng(0)
    slots = rng.permutation(max_seqs)[:7].astype(np.int32)
    lengths, starts = np.array([1, 1, 1, 5, 150, 1, 128]), rng.integers(0, 10, 7)
    positions = np.concatenate(
        [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    )
    ids = rng.integers(0, 100_000, positions.size)
    ids[:3] = NEXT_TOKEN.value
    padding = 9
    columns: list[npt.NDArray[np.signedinteger]] = [np.repeat(slots, lengths), ids, positions]
    order, token_ids, places = (
        torch.from_numpy(np.append(column, np.full(padding, filler)).astype(np.int32)).to(device)
        for column, filler in zip(columns, (max_seqs, 0, 0), strict=True)
    )
    own = expected.last_tokens.index_select(0, order.long())
    exact_ids = torch.where(token_ids == NEXT_TOKEN.value, own, token_ids)
    exact_indices = expected.locate(order.long(), places.long())
    expected_history.write(exact_indices, exact_ids)
    slots_at, ends_at = torch.from_numpy(slots).to(device), torch.from_numpy(starts + lengths).to(device)
    expected.advance(slots_at.long(), ends_at)
    expected.positions[max_seqs] = actual.positions[max_seqs]
    tables = actual.last_tokens, actual.positions, actual.page_table
    begun = begin_rows(order, *tables, page_size, history.ids, (token_ids, places))
    for column, exact in zip(begun, (exact_ids, places, exact_indices, places + 1), strict=True):
        assert torch.equal(column, exact.to(column.dtype))
    assert [column.dtype for column in begun] == [torch.int64] * 3 + [torch.int32]
    assert torch.equal(actual.positions, expected.positions)
    assert torch.equal(actual.last_tokens, expected.last_tokens)
    assert torch.equal(history.ids, expected_history.ids)


def test_no_rows(device: torch.device) -> None:
    rows, _ = make_rows(device, 2, 16, 4)
    before = rows.positions.clone()
    begun = begin_rows(rows.order[:0], rows.last_tokens, rows.positions, rows.page_table, 16)
    assert [len(column) for column in begun] == [0] * 4
    assert torch.equal(rows.positions, before)
