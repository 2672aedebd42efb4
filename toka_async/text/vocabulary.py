"""Finds the tokens of a vocabulary that begin with or contain given bytes.

The index is built once for a model. Knows no stop strings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Bool, Int64
from toka_async.text.tokenizer import Tokenizer


class Vocabulary:
    """An index of the bytes of all tokens, both inside and at the start of a text.

    size: the highest id plus one. max_bytes: bytes of the longest token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.pieces
        self.size = tokenizer.vocab_size
        self.max_bytes = max(map(len, pieces.rest.values()), default=0)
        self._rest = _Index(pieces.rest)
        self._first = self._rest if pieces.first is pieces.rest else _Index(pieces.first)

    def find_containing(self, part: bytes) -> Int64:
        """Returns the ids of tokens with `part` inside, in any order, perhaps repeated."""
        if self._first is self._rest:
            return self._rest.find_containing(part)
        return np.concatenate([self._rest.find_containing(part), self._first.find_containing(part)])

    def find_starting(self, prefix: bytes) -> Int64:
        """Returns the ids of tokens that begin with `prefix` when they follow other tokens."""
        return self._rest.find_starting(prefix)


class _Index:
    """Tokens sorted by their bytes, so that a prefix is a range, and laid end to end for a search in them all."""

    def __init__(self, table: Mapping[int, bytes]) -> None:
        items = sorted((piece, i) for i, piece in table.items() if piece)
        self._sorted = [piece for piece, _ in items]
        self._ids = np.array([i for _, i in items], dtype=np.int64)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(b"".join(self._sorted), dtype=np.uint8)
        self._owners = np.repeat(np.arange(len(items)), [len(piece) for piece in self._sorted])  # each byte's row

    def find_starting(self, prefix: bytes) -> Int64:
        low = bisect_left(self._sorted, prefix)
        high = bisect_left(self._sorted, True, lo=low, key=lambda piece: not piece.startswith(prefix))
        return self._ids[low:high]

    def find_containing(self, part: bytes) -> Int64:
        last = len(self._bytes) - len(part) + 1
        if last <= 0:
            return self._ids[:0]
        places = np.flatnonzero(self._bytes[:last] == part[0])
        for offset, byte in enumerate(part[1:], start=1):
            places = places[self._bytes[places + offset] == byte]
            if not places.size:
                break
        rows = self._owners[places]
        inside: Bool = rows == self._owners[places + len(part) - 1]
        return self._ids[rows[inside]]
