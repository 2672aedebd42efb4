"""Stop strings as the scheduler sees them: for each set, the token ids that can complete one of its strings."""

from __future__ import annotations

import numpy as np

from toka_async.arrays import Bool, Int32, as_bool
from toka_async.messages import StopMask


class StopTable:
    """Masks over the vocabulary, one row for each of the server's stop ids; rows are reused after `drop`."""

    def __init__(self, vocab_size: int) -> None:
        self._masks: Bool = np.zeros((1, vocab_size), np.bool_)
        self._windows = np.zeros(1, np.int32)
        self._rows: dict[int, int] = {}
        self._free = [0]

    def add(self, message: StopMask) -> None:
        if not self._free:
            rows = self._masks.shape[0]
            self._masks = np.concatenate([self._masks, np.zeros_like(self._masks)])
            self._windows = np.concatenate([self._windows, np.zeros_like(self._windows)])
            self._free = list(range(2 * rows - 1, rows - 1, -1))
        row = self._rows.get(message.stop_id)
        if row is None:
            row = self._rows[message.stop_id] = self._free.pop()
        mask = as_bool(message.mask)
        self._masks[row] = False
        self._masks[row, : mask.size] = mask
        self._windows[row] = message.window

    def drop(self, stop_id: int) -> None:
        row = self._rows.pop(stop_id, None)
        if row is not None:
            self._free.append(row)

    def row(self, stop_id: int) -> int:
        """The row of a stop id, -1 for -1. Raises KeyError for an unknown id."""
        return -1 if stop_id < 0 else self._rows[stop_id]

    def find_hits(self, rows: Int32, tokens: Int32) -> Bool:
        """Find the tokens that can complete a string of their row's set, bool [r]; row -1 never does. Both [r]."""
        return (rows >= 0) & self._masks[rows, tokens]

    def window(self, row: int) -> int:
        return int(self._windows[row])
