"""The bytes of many tokens at once: a table of fixed width, gathered by token id.

Knows bytes only; what they spell is the caller's business.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Int32

WIDTH = 16  # bytes; tokens that are longer are rare
PAD = 0xFF  # in no UTF-8 text
STAND_IN = 0xFE  # for a token's own 0xFF: neither is ever a part of a character, each becomes one U+FFFD


class ByteTable:
    """Bytes by token id; ids outside of `pieces` have none. A token's byte 0xFF comes out as 0xFE."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        width = min(WIDTH, max(map(len, pieces.values()), default=1) or 1)
        size = max(pieces, default=-1) + 2  # the last row stands for all ids beyond
        self._lengths: Int32 = np.zeros(size, np.int32)
        self._rows: npt.NDArray[np.uint8] = np.full((size, width), PAD, np.uint8)
        ids, lengths = np.array(list(pieces), np.int64), np.array(list(map(len, pieces.values())), np.int64)
        self._lengths[ids] = lengths
        flat = np.frombuffer(b"".join(pieces.values()), np.uint8)
        places = np.arange(flat.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        fits = places < width
        flat = np.where(flat == PAD, np.uint8(STAND_IN), flat)
        self._rows[np.repeat(ids, lengths)[fits], places[fits]] = flat[fits]

    def split(self, token_ids: Int32, counts: Int32) -> list[bytes]:
        """The bytes of `counts` tokens each, one row after the other in `token_ids`."""
        known = np.minimum(token_ids, len(self._rows) - 1)
        lengths = self._lengths.take(known)
        if lengths.size and lengths.max() > self._rows.shape[1]:
            raw = b"".join(self._pieces.get(i, b"") for i in token_ids.tolist())
        else:
            raw = self._rows.take(known, axis=0).tobytes().translate(None, bytes([PAD]))
        sums = np.concatenate([[0], np.cumsum(lengths)])
        ends = sums[np.cumsum(counts)].tolist()
        return [raw[start:end] for start, end in zip([0, *ends], ends, strict=False)]
