"""Gathers the bytes of many tokens at once from a table of fixed width. Knows bytes, not what they spell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Int32, Int64

Bytes = npt.NDArray[np.uint8]

WIDTH = 16  # bytes; longer tokens are rare
PAD = 0xFF  # in no UTF-8 text
LONG = 0xFD  # stands for the bytes of a token that is wider than the table; in no UTF-8 text either
STAND_IN = 0xFE  # replaces a token's own 0xFF or 0xFD: no character has any of the three; each becomes one U+FFFD


class ByteTable:
    """Bytes by token id. Ids outside of `pieces` have none; bytes 0xFF and 0xFD of a token come out as 0xFE."""

    def __init__(self, pieces: Mapping[int, bytes], width: int = WIDTH) -> None:
        self._long = {i: piece for i, piece in pieces.items() if len(piece) > width}
        width = min(width, max(map(len, pieces.values()), default=1) or 1)
        size = max(pieces, default=-1) + 2  # the last row stands for all ids beyond
        self._lengths: Int32 = np.zeros(size, np.int32)
        self._rows: Bytes = np.full((size, width), PAD, np.uint8)
        ids, lengths = np.array(list(pieces), np.int64), np.array(list(map(len, pieces.values())), np.int64)
        self._lengths[ids] = lengths
        flat = np.frombuffer(b"".join(pieces.values()), np.uint8)
        places = np.arange(flat.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        fits = np.repeat(lengths <= width, lengths)
        flat = np.where((flat == PAD) | (flat == LONG), np.uint8(STAND_IN), flat)
        self._rows[np.repeat(ids, lengths)[fits], places[fits]] = flat[fits]
        self._rows[list(self._long), 0] = LONG

    def rows(self, token_ids: Int32) -> tuple[Bytes, Int32, list[bytes]]:
        """Returns each token's bytes, padded [t, width], their numbers [t], and the bytes of the long ones in order.

        The row of a long token is LONG, which `pack` replaces by the bytes.
        """
        known = np.minimum(token_ids, len(self._rows) - 1)
        lengths = self._lengths.take(known)
        rows = self._rows.take(known, axis=0)
        long = np.flatnonzero(lengths > self._rows.shape[1])
        return rows, lengths, [self._long[i] for i in token_ids[long].tolist()]

    def split(self, token_ids: Int32, counts: Int32 | Int64) -> list[bytes]:
        """Returns one row of bytes for each of `counts`, the number of tokens that it has of `token_ids`."""
        rows, lengths, long = self.rows(token_ids)
        return cut(pack(rows, long), lengths, counts)


def pack(rows: Bytes, long: Sequence[bytes]) -> bytes:
    """Returns the rows' bytes without padding, with the next of `long` in place of each LONG."""
    raw: bytes = rows[rows != PAD].tobytes()  # without the interpreter's lock, as `bytes.translate` is not
    if not long:
        return raw
    return b"".join(chain.from_iterable(zip_longest(raw.split(bytes([LONG])), long, fillvalue=b"")))


def cut(raw: bytes, lengths: Int32, counts: Int32 | Int64) -> list[bytes]:
    """Cuts bytes into rows of `counts` tokens each; `lengths` [t] are the bytes of each token."""
    sums = np.concatenate([[0], np.cumsum(lengths)])
    ends = sums[np.cumsum(counts)].tolist()
    return [raw[start:end] for start, end in zip([0, *ends], ends, strict=False)]
