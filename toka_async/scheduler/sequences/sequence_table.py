"""The scheduler's table of running sequences: a row each, in columns.

A row outlives its slot on the ranks: a sequence that ends by length gives its slot and pages to the very next step,
while its last tokens are still on their way. The row is used again when no queued step refers to it. Knows no content
of requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Bool, Int32, Int64

NUM_ENDS = 4  # end token ids in a column; models have one to three


class SequenceTable:
    """Columns over sequences; all columns grow together. `seq` and `seqs` are indices of rows everywhere.

    slot: row on the ranks. position: of the next token to compute. remaining: tokens yet to be built into steps. head:
    newest own page (chains). holds: slot and pages are still its own. alive: its tokens are wanted. last_step: newest
    step that computes it. priority, arrival, sample: its place in the order of work; sample is -1 for a sequence that
    computes a prompt for several samples. ends: its first end token ids, -1 elsewhere; end_set: number of the set of
    all others, or -1. single: it is its request's only sample. num_shared: leading pages that are its prompt's.
    max_tokens: its request's.

    For the forecast: can_stop: it may end before max_tokens; group: in the length predictor; length_rank: its place in
    the distribution of lengths, in (0, 1); expected: tokens that it is expected to generate, 0 at first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slot = np.zeros(capacity, np.int32)
        self.position = np.zeros(capacity, np.int32)
        self.remaining = np.zeros(capacity, np.int32)
        self.request = np.zeros(capacity, np.int32)
        self.sample = np.zeros(capacity, np.int32)
        self.priority = np.zeros(capacity, np.int64)
        self.arrival = np.zeros(capacity, np.int64)
        self.prompt_key = np.zeros(capacity, np.int32)
        self.num_shared = np.zeros(capacity, np.int32)
        self.max_tokens = np.zeros(capacity, np.int32)
        self.can_stop: Bool = np.zeros(capacity, np.bool_)
        self.group = np.zeros(capacity, np.int32)
        self.length_rank = np.zeros(capacity, np.float64)
        self.expected = np.zeros(capacity, np.int32)
        self.head = np.full(capacity, -1, np.int32)
        self.last_step = np.zeros(capacity, np.int64)
        self.alive: Bool = np.zeros(capacity, np.bool_)
        self.holds: Bool = np.zeros(capacity, np.bool_)
        self.stream: Bool = np.zeros(capacity, np.bool_)
        self.single: Bool = np.zeros(capacity, np.bool_)
        self.num_logprobs = np.full(capacity, -1, np.int32)
        self.wants_kept: Bool = np.zeros(capacity, np.bool_)
        self.stop_row = np.full(capacity, -1, np.int32)
        self.min_tokens = np.zeros(capacity, np.int32)
        self.ends = np.full((capacity, NUM_ENDS), -1, np.int32)
        self.end_set = np.full(capacity, -1, np.int32)
        self._end_sets: dict[bytes, int] = {}  # ids beyond the column -> number of their set
        self._end_keys: Int64 = np.empty(0, np.int64)  # number << 32 | id of all sets, sorted
        self._num_end_sets = 0  # ever added
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._retired: defaultdict[int, list[Int32]] = defaultdict(list)

    @property
    def num_free(self) -> int:
        return self._free.size

    def take(self, count: int) -> Int32:
        """Take rows for new sequences, which hold a slot and no pages; grows if needed. The caller sets the rest."""
        while self._free.size < count:
            self._grow()
        seqs = self._free[self._free.size - count :]
        self._free = self._free[: self._free.size - count]
        where = index(seqs)
        self.head[where] = -1
        self.last_step[where] = -1
        self.alive[where] = True
        self.holds[where] = True
        self.ends[where] = -1
        self.end_set[where] = -1
        return seqs

    def describe(self, where: Int32 | slice, requests: Sequence[tuple[int, ...]]) -> None:
        """Set the columns of requests (`Request.columns`): one request for all rows, or one for each."""
        columns: tuple[npt.NDArray[Any], ...] = (
            self.request,
            self.priority,
            self.arrival,
            self.max_tokens,
            self.can_stop,
            self.group,
            self.stream,
            self.single,
            self.num_logprobs,
            self.wants_kept,
            self.stop_row,
            self.min_tokens,
        )
        for column, values in zip(columns, np.asarray(requests, np.int64).T, strict=True):
            column[where] = values

    def retire(self, seqs: Int32, completed: int) -> None:
        """Free each row once the last step that computes it is complete; `completed` is the newest such step."""
        steps: Int64 = self.last_step[seqs]
        now = steps <= completed
        if now.any():
            self._free = np.concatenate([self._free, seqs[now]])
        for step in set(steps[~now].tolist()):
            self._retired[step].append(seqs[steps == step])

    def complete(self, step: int) -> None:
        for seqs in self._retired.pop(step, ()):
            self._free = np.concatenate([self._free, seqs])

    def set_ends(self, seqs: Int32, end_ids: Int32) -> None:
        few = end_ids[:NUM_ENDS]
        self.ends[index(seqs), : few.size] = few
        if end_ids.size > NUM_ENDS:
            more = np.unique(end_ids[NUM_ENDS:])
            number = self._end_sets.get(more.tobytes())
            self.end_set[index(seqs)] = self._add_end_set(more) if number is None else number

    def find_ended(self, seqs: Int32, tokens: Int32) -> Bool:
        """Find the tokens that end their sequence, bool [r]; both arguments are [r]."""
        ended: Bool = (self.ends[seqs] == tokens[:, None]).any(axis=1)
        if self._end_keys.size:
            sets = self.end_set[seqs]
            rows = np.flatnonzero(sets >= 0)
            keys = _end_keys(sets[rows], tokens[rows])
            places = np.searchsorted(self._end_keys, keys)
            ended[rows] |= self._end_keys[np.minimum(places, self._end_keys.size - 1)] == keys
        return ended

    def _add_end_set(self, end_ids: Int32) -> int:
        """Add a set and return its number. Unused sets are forgotten when they are the majority."""
        used = np.unique(self.end_set)
        if len(self._end_sets) > 2 * used.size:
            self._end_sets = {ids: number for ids, number in self._end_sets.items() if number in set(used.tolist())}
            self._end_keys = self._end_keys[np.isin(self._end_keys >> 32, used)]
        number, self._num_end_sets = self._num_end_sets, self._num_end_sets + 1
        self._end_sets[end_ids.tobytes()] = number
        self._end_keys = np.concatenate([self._end_keys, _end_keys(np.full_like(end_ids, number), end_ids)])
        return number

    def find_living(self, request_id: int) -> Int32:
        return np.flatnonzero((self.request == request_id) & self.alive).astype(np.int32)

    def find_youngest(self) -> int:
        """Find the sequence that is last in order among those that hold a slot, or -1."""
        seqs = np.flatnonzero(self.holds)
        for column in (self.priority, self.arrival, self.sample):
            values = column[seqs]
            seqs = seqs[values == values.max(initial=-(2**31))]
        return int(seqs[0]) if seqs.size else -1

    def sort_last_first(self) -> Int32:
        """Sort the sequences that hold a slot, the last in order first."""
        seqs = np.flatnonzero(self.holds).astype(np.int32)
        keys = (self.sample[seqs], self.arrival[seqs], self.priority[seqs])
        return seqs[np.lexsort(keys)[::-1]]

    def lowest_priority(self) -> int | None:
        """The greatest priority number among sequences that hold a slot."""
        priorities = self.priority[self.holds]
        return int(priorities.max()) if priorities.size else None

    def order(self, seq: int) -> tuple[int, int, int]:
        """The place of a sequence in the order of work, as `PrefillTask.order`."""
        return (int(self.priority[seq]), int(self.arrival[seq]), int(self.sample[seq]))

    def _grow(self) -> None:
        old = self.capacity
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray) and name not in ("_free", "_end_keys"):
                setattr(self, name, _double(column))
        self.capacity = 2 * old
        self._free = np.concatenate([self._free, np.arange(2 * old - 1, old - 1, -1, dtype=np.int32)])

    def check(self) -> None:
        retired = [seqs for parts in self._retired.values() for seqs in parts]
        idle = np.concatenate([self._free, *retired]) if retired else self._free
        assert np.unique(idle).size == idle.size
        assert not self.alive[idle].any()
        assert not self.holds[idle].any()
        assert self.slot.size == self.ends.shape[0] == self.capacity


def index(seqs: Int32) -> Int32 | slice:
    """Index the columns; a slice for a single sequence costs a tenth."""
    return slice(int(seqs[0]), int(seqs[0]) + 1) if seqs.size == 1 else seqs


def _end_keys(sets: Int32, end_ids: Int32) -> Int64:
    return sets.astype(np.int64) << 32 | end_ids


def _double(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([column, np.zeros_like(column)])
