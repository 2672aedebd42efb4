from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toka_async.text.byte_table import WIDTH, ByteTable


@given(
    pieces=st.dictionaries(st.integers(0, 12), st.binary(max_size=WIDTH + 2), max_size=8),
    rows=st.lists(st.lists(st.integers(0, 20), max_size=6), min_size=1, max_size=5),
    width=st.integers(1, WIDTH),
)
def test_rows_are_the_pieces_joined(pieces: dict[int, bytes], rows: list[list[int]], width: int) -> None:
    ids = np.array([i for row in rows for i in row], np.int32)
    split = ByteTable(pieces, width).split(ids, np.array([len(row) for row in rows], np.int32))
    joined = [b"".join(pieces.get(i, b"") for i in row) for row in rows]
    assert [raw.decode("utf-8", "replace") for raw in split] == [raw.decode("utf-8", "replace") for raw in joined]


def test_a_stand_in_is_as_invalid() -> None:
    table = ByteTable({0: b"a\xff", 1: b"\xe4\xbd", 2: b"\xfd\xa0"})
    (raw,) = table.split(np.array([0, 1, 2, 0], np.int32), np.array([4], np.int32))
    assert raw == b"a\xfe\xe4\xbd\xfe\xa0a\xfe"
    assert raw.decode("utf-8", "replace") == b"a\xff\xe4\xbd\xfd\xa0a\xff".decode("utf-8", "replace")
