"""Follows rows through their grammars on a rank: which tokens each may draw next.

Threads advance and ask the rows' matchers without the interpreter's lock, each those of its lane (see `originals`).
Waking a thread takes as long as several rows, so a step wakes each once. Knows slots and token ids; knows no requests
and no torch.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Bool, Int32, Int64
from toka_async.grammars.originals import Originals
from toka_async.grammars.vocabulary import GrammarVocabulary, shorten_error

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

logger = logging.getLogger(__name__)

FEW = 4  # rows; so many take less time than it takes to wake threads
MOST_THREADS = 16
WORD = 32  # ids of a word of a mask


def count_mask_threads(num_sharing: int) -> int:
    """Counts the threads in which each of `num_sharing` ranks of a machine makes masks, beside its own."""
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // num_sharing - 3))


@dataclass(slots=True, frozen=True)
class GrammarRow:
    """What is known of a row when it is admitted. generated: int32, tokens of its output so far."""

    slot: int
    grammar: str
    generated: Int32
    min_tokens: int


@dataclass(slots=True, frozen=True)
class _Run:
    """A lane's rows that go on, as the library takes them: places and slots, int64 and int32 [r].

    change: number of the last change of any row when they were found. stopped: int64, places of the lane's other rows.
    """

    change: int
    places: Int64
    slots: Int32
    stopped: Int64
    matchers: list[LLMatcher]
    pairs: list[tuple[LLMatcher, int]]  # with places


@dataclass(slots=True, frozen=True)
class MatchedRows:
    """Rows on their way: slots int32 [r], all different, and which of each slot's rows, int64 [r].

    lanes: int64, the places of each lane's rows. runs: those of each lane that go on, as they were found last.
    """

    slots: Int32
    numbers: Int64
    lanes: tuple[Int64, ...]
    runs: list[_Run | None]


Drawn = tuple[MatchedRows, Int32]  # rows and the token that each drew


class RowMatchers:
    """The rows with a grammar, by slot. A row stops once it has drawn an end token, or has failed.

    Work is by column: Python touches an object of each row only to hand its matcher to the library.

    Args:
        num_threads: in which masks are made; each has a lane.
    """

    def __init__(self, vocabulary: GrammarVocabulary, max_seqs: int, num_threads: int) -> None:
        self._vocabulary = vocabulary
        self._num_threads = num_threads
        self._executors: list[LLExecutor] = []  # of each lane; they and the threads are made when they are needed
        self._threads = ThreadPoolExecutor(num_threads, "masks")
        self._originals = Originals(vocabulary, num_threads, self._threads)
        self._admitted: dict[int, GrammarRow] = {}  # that have not started
        self._num_rows = 0
        self._changes = count()  # numbers, also for threads
        # Number of the last change to which rows exist or go on; stored after the change itself.
        self._change = next(self._changes)
        # By slot.
        self._has_row: Bool = np.zeros(max_seqs, np.bool_)
        self._number: Int64 = np.zeros(max_seqs, np.int64)  # of its row; another one for each
        self._matchers: npt.NDArray[np.object_] = np.full(max_seqs, None, object)  # None: the row has stopped
        self._goes_on: Bool = np.zeros(max_seqs, np.bool_)
        self._has_failed: Bool = np.zeros(max_seqs, np.bool_)
        self._lane: npt.NDArray[np.uint8] = np.zeros(max_seqs, np.uint8)
        self._grammar: npt.NDArray[np.object_] = np.full(max_seqs, None, object)
        self._num_tokens: Int64 = np.zeros(max_seqs, np.int64)
        self._min_tokens: Int64 = np.zeros(max_seqs, np.int64)
        ends = np.asarray(sorted(vocabulary.end_ids), np.int64)
        self._end_ids = ends[(ends >= 0) & (ends < vocabulary.num_tokens)]
        self._is_end: Bool = np.isin(np.arange(vocabulary.num_tokens), self._end_ids)
        self.num_words = -(-vocabulary.num_tokens // WORD)

    def __len__(self) -> int:
        return self._num_rows

    def free(self, slots: Int32) -> None:
        """Forgets the slots' rows, if they have a grammar."""
        freed = slots[self._has_row[slots]]
        for slot in freed.tolist() if self._admitted else ():
            self._admitted.pop(slot, None)
        self._has_row[freed] = self._goes_on[freed] = False
        self._matchers[freed] = self._grammar[freed] = None
        self._num_rows -= freed.size
        self._change = next(self._changes)

    def admit(self, rows: Sequence[GrammarRow]) -> None:
        """Takes new rows; the slots are free. They start when they are asked for; grammars are compiled meanwhile."""
        self._admitted |= {row.slot: row for row in rows}
        slots = [row.slot for row in rows]
        self._has_row[slots] = True
        self._number[slots] += 1
        for grammar in {row.grammar: None for row in rows}:
            self._originals.expect(grammar)
        self._num_rows += len(rows)

    def has_any(self, slots: Int32) -> bool:
        """Whether a row of these has a grammar."""
        return bool(self._has_row[slots].any())

    def find(self, slots: Int32) -> Int64:
        """Finds the places of rows with a grammar."""
        return np.flatnonzero(self._has_row[slots])

    def take(self, slots: Int32) -> MatchedRows:
        """Takes the slots' rows, each of which has a grammar."""
        self._start_admitted()
        lanes = self._lane[slots]
        ends = np.cumsum(np.bincount(lanes, minlength=self._num_threads))
        by_lane = np.split(np.argsort(lanes, kind="stable"), ends[:-1])
        return MatchedRows(slots, self._number[slots], tuple(by_lane), [None] * len(by_lane))

    def advance(self, rows: MatchedRows, token_ids: Int32) -> None:
        """Advances each row by a token that it drew, unless it has stopped or its slot has another one."""
        if rows.slots.size <= FEW:
            for row in zip(rows.slots.tolist(), rows.numbers.tolist(), token_ids.tolist(), strict=True):
                self._advance_row(*row)
        else:
            list(self.fill_parts((), (), (rows, token_ids)))

    def _advance_lane(self, rows: MatchedRows, token_ids: Int32, lane: int) -> None:
        run = self._find_run(rows, lane)
        if not run.matchers:
            return
        ids = token_ids[run.places]
        taken = self._executors[lane].consume_token_par(list(zip(run.matchers, ids.tolist(), strict=True)))
        self._num_tokens[run.slots] += 1
        is_end = self._is_end[ids]
        if is_end.any() or not all(taken):
            self._stop(run.slots[is_end & taken])
            for slot in run.slots[~np.array(taken)].tolist():
                self._note_error(slot)

    def _find_run(self, rows: MatchedRows, lane: int) -> _Run:
        """Finds a lane's rows that have not stopped and still have their slots. Most steps change none."""
        run, change = rows.runs[lane], self._change
        if run is None or run.change != change:
            places = rows.lanes[lane]
            slots = rows.slots[places]
            goes_on = self._goes_on[slots] & (self._number[slots] == rows.numbers[places])
            going, slots = places[goes_on], slots[goes_on]
            matchers: list[LLMatcher] = self._matchers[slots].tolist()
            pairs = list(zip(matchers, going.tolist(), strict=True))
            rows.runs[lane] = run = _Run(change, going, slots, places[~goes_on], matchers, pairs)
        return run

    def _advance_row(self, slot: int, number: int, token_id: int) -> None:
        if not self._goes_on[slot] or self._number[slot] != number:
            return
        self._num_tokens[slot] += 1
        if not self._matchers[slot].consume_token(token_id):
            self._note_error(slot)
        elif token_id in self._vocabulary.end_ids:
            self._stop(slot)

    def fill(self, rows: MatchedRows, masks: Int32) -> list[int]:
        """Does as `fill_parts` for all rows at once."""
        (failed,) = self.fill_parts((rows,), (masks,))
        return failed

    def fill_parts(
        self, parts: Sequence[MatchedRows], tables: Sequence[Int32], drawn: Drawn | None = None
    ) -> Iterator[list[int]]:
        """Writes a mask of each row, int32 [r, num_words]: the bits of ids that it may draw, lowest first.

        The slots have these rows, of which `drawn` are advanced before, as `advance` does. A row that has stopped may
        draw anything. Yields the places of those that have failed, part after part, while threads go on with the next.
        """
        if sum(rows.slots.size for rows in parts) <= FEW and (drawn is None or drawn[0].slots.size <= FEW):
            if drawn is not None:
                self.advance(*drawn)
            for rows, masks in zip(parts, tables, strict=True):
                yield [
                    place for place, slot in enumerate(rows.slots.tolist()) if not self._fill_row(slot, masks[place])
                ]
            return
        for rows, masks in zip(parts, self._run_lanes(parts, tables, drawn), strict=True):
            goes_on = self._goes_on[rows.slots]
            held = goes_on & (self._num_tokens[rows.slots] < self._min_tokens[rows.slots])
            suspects = self._find_suspects(np.flatnonzero(goes_on), masks).tolist()
            for place in {*suspects, *np.flatnonzero(held).tolist()}:
                self._check_mask(rows.slots[place], masks[place])
            yield np.flatnonzero(self._has_failed[rows.slots]).tolist()

    def _run_lanes(self, parts: Sequence[MatchedRows], tables: Sequence[Int32], drawn: Drawn | None) -> Iterator[Int32]:
        """Works in the threads of all lanes; yields the masks of each part when they are complete."""
        every = parts if drawn is None else (*parts, drawn[0])
        lanes = [lane for lane in range(self._num_threads) if any(rows.lanes[lane].size for rows in every)]
        left, guard = [len(lanes)] * len(parts), Lock()
        complete: SimpleQueue[int] = SimpleQueue()

        def work(lane: int) -> None:
            if drawn is not None:
                self._advance_lane(*drawn, lane)
            for number, (rows, masks) in enumerate(zip(parts, tables, strict=True)):
                self._fill_lane(rows, masks, lane)
                with guard:
                    left[number] -= 1
                    if not left[number]:
                        complete.put(number)

        def note_failure(done: Future[None]) -> None:
            if done.exception() is not None:
                complete.put(-1)

        self._make_executors()
        working = [self._threads.submit(work, lane) for lane in lanes]
        for done in working:
            done.add_done_callback(note_failure)
        for masks in tables:
            if complete.get() < 0:
                break
            yield masks
        for done in working:
            done.result()

    def _fill_lane(self, rows: MatchedRows, masks: Int32, lane: int) -> None:
        run = self._find_run(rows, lane)
        masks[run.stopped] = -1
        if run.pairs:
            size = WORD // 8 * self.num_words
            self._executors[lane].unsafe_compute_mask_ptr(run.pairs, masks.ctypes.data, size, len(masks))

    def _fill_row(self, slot: int, mask: Int32) -> bool:
        """Returns whether the row has not failed."""
        if self._goes_on[slot]:
            self._matchers[slot].unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check_mask(slot, mask)
        else:
            mask.fill(-1)
        return not self._has_failed[slot]

    def _check_mask(self, slot: int, mask: Int32) -> None:
        """Notes whether a row has failed, of which its mask says nothing, and holds its ends back as it wants."""
        if self._matchers[slot].is_error():
            self._note_error(slot)
            mask.fill(-1)
        elif self._num_tokens[slot] < self._min_tokens[slot]:
            self._hold_ends(mask)

    def _find_suspects(self, places: Int64, masks: Int32) -> Int64:
        """Finds rows that may have failed: the library allows these the ends."""
        if not self._end_ids.size:
            return places
        word, bit = divmod(int(self._end_ids[0]), WORD)
        suspects: Int64 = places[(masks[places, word] >> bit) & 1 == 1]
        return suspects

    def _hold_ends(self, mask: Int32) -> None:
        """Forbids end tokens, unless nothing else is allowed: a complete output cannot go on."""
        words, bits = self._end_ids // WORD, np.int32(1) << (self._end_ids % WORD).astype(np.int32)
        held = mask.copy()
        np.bitwise_and.at(held, words, ~bits)
        if held.any():
            mask[:] = held

    def _make_executors(self) -> None:
        if not self._executors:
            from llguidance import LLExecutor

            self._executors = [LLExecutor(1) for _ in range(self._num_threads)]

    def _start_admitted(self) -> None:
        if not self._admitted:
            return
        rows = [*self._admitted.values()]
        self._originals.add_rows(Counter(row.grammar for row in rows))
        self._start([row for row in rows if not row.generated.size])
        for row in rows:
            if row.generated.size:  # before a preemption; one by one, as a row that fails may spoil its original
                self._start([row])
                if self._goes_on[row.slot] and not self._matchers[row.slot].consume_tokens(row.generated.tolist()):
                    self._note_error(row.slot)
        self._admitted.clear()
        self._change = next(self._changes)

    def _start(self, rows: Sequence[GrammarRow]) -> None:
        """Gives rows matchers; their grammars are compiled."""
        slots, num_rows = [row.slot for row in rows], Counter(row.grammar for row in rows)
        copies = {grammar: self._originals.copy(grammar, number) for grammar, number in num_rows.items()}
        copied = [next(copies[row.grammar], (0, None)) for row in rows]
        self._num_tokens[slots] = [row.generated.size for row in rows]
        self._min_tokens[slots] = [row.min_tokens for row in rows]
        self._grammar[slots] = [row.grammar for row in rows]
        self._lane[slots] = [lane for lane, _ in copied]
        self._matchers[slots] = [matcher for _, matcher in copied]
        self._has_failed[slots] = fails = [matcher is None for _, matcher in copied]
        self._goes_on[slots] = [not failed for failed in fails]

    def _stop(self, slots: Int32 | int) -> None:
        self._goes_on[slots] = False
        self._matchers[slots] = None
        self._change = next(self._changes)

    def _note_error(self, slot: int) -> None:
        error = shorten_error(self._matchers[slot].get_error()) or "it does not go on"
        self._has_failed[slot], self._goes_on[slot], self._matchers[slot] = True, False, None
        self._change = next(self._changes)
        logger.warning("a grammar failed after %d tokens: %s", self._num_tokens[slot], error)
        if "panic" in error:  # the library leaves the shared lexer locked: no further row may copy this original
            self._originals.drop(self._grammar[slot], int(self._lane[slot]))
