"""The scheduler's tables of running sequences: one lane each, in columns.

A lane outlives its slot: a sequence that ends by length gives its slot and pages to the very next step, while its last
tokens are still on their way; the lane is used again when no queued step refers to it. Knows no requests' content.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Bool, Int32, Int64


class Lanes:
    """Columns over lanes; every column grows together.

    slot: row on the ranks. position: of the next token to compute. remaining: tokens yet to be built into steps.
    head: newest own page (chains). holds: slot and pages are still its own. alive: its tokens are wanted.
    last_step: newest step that computes it. ends: end token ids, -1 elsewhere.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slot = np.zeros(capacity, np.int32)
        self.position = np.zeros(capacity, np.int32)
        self.remaining = np.zeros(capacity, np.int32)
        self.request = np.zeros(capacity, np.int32)
        self.sample = np.zeros(capacity, np.int32)
        self.prompt_key = np.zeros(capacity, np.int32)
        self.head = np.full(capacity, -1, np.int32)
        self.last_step = np.zeros(capacity, np.int64)
        self.alive: Bool = np.zeros(capacity, np.bool_)
        self.holds: Bool = np.zeros(capacity, np.bool_)
        self.stream: Bool = np.zeros(capacity, np.bool_)
        self.num_logprobs = np.full(capacity, -1, np.int32)
        self.stop_row = np.full(capacity, -1, np.int32)
        self.min_tokens = np.zeros(capacity, np.int32)
        self.ends = np.full((capacity, 1), -1, np.int32)
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._retired: defaultdict[int, list[Int32]] = defaultdict(list)

    @property
    def num_free(self) -> int:
        return self._free.size

    def take(self, count: int) -> Int32:
        """Fresh lanes; the tables grow when none are free. Columns not set by the caller are at their defaults."""
        while self._free.size < count:
            self._grow()
        lanes = self._free[self._free.size - count :]
        self._free = self._free[: self._free.size - count]
        self.head[lanes] = -1
        self.remaining[lanes] = 0
        self.last_step[lanes] = -1
        self.alive[lanes] = True
        self.holds[lanes] = True
        self.stop_row[lanes] = -1
        self.ends[lanes] = -1
        return lanes

    def retire(self, lanes: Int32, completed: int) -> None:
        """The lanes are done with; each is free once the last step that computes it is complete."""
        steps: Int64 = self.last_step[lanes]
        now = steps <= completed
        if now.any():
            self._free = np.concatenate([self._free, lanes[now]])
        for step in np.unique(steps[~now]).tolist():
            self._retired[step].append(lanes[steps == step])

    def complete(self, step: int) -> None:
        """A step is complete: lanes retired until then are free."""
        for lanes in self._retired.pop(step, ()):
            self._free = np.concatenate([self._free, lanes])

    def set_ends(self, lanes: Int32, end_ids: Int32) -> None:
        """End token ids of the lanes; the table widens to the longest list there was."""
        if end_ids.size > self.ends.shape[1]:
            wider = np.full((self.capacity, end_ids.size), -1, np.int32)
            wider[:, : self.ends.shape[1]] = self.ends
            self.ends = wider
        self.ends[lanes, : end_ids.size] = end_ids

    def _grow(self) -> None:
        old = self.capacity
        for name, table in list(vars(self).items()):
            if isinstance(table, np.ndarray) and name != "_free":
                setattr(self, name, _doubled(table))
        self.capacity = 2 * old
        self._free = np.concatenate([self._free, np.arange(2 * old - 1, old - 1, -1, dtype=np.int32)])

    def check(self) -> None:
        retired = [lanes for parts in self._retired.values() for lanes in parts]
        idle = np.concatenate([self._free, *retired]) if retired else self._free
        assert np.unique(idle).size == idle.size
        assert not self.alive[idle].any()
        assert not self.holds[idle].any()
        assert self.slot.size == self.ends.shape[0] == self.capacity


def _doubled(table: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([table, np.zeros_like(table)])
