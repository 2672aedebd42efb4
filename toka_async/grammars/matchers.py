"""Follows rows through their grammars on a rank: which tokens each may draw next.

Threads of the library advance and ask the rows' matchers, without the interpreter's lock, mostly each those of its lane
(see `originals`). Waking a thread, and giving it the interpreter's lock, takes as long as several rows. So a thread of
ours wakes a team of the library's, a step wakes each once, and all that is not the library's work is done before and
after, for all rows at once. Knows slots and token ids; knows no requests and no torch.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, count
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Bool, Int32, Int64
from toka_async.grammars.originals import Originals
from toka_async.grammars.team_rows import Failure, TeamRows, advance, fill
from toka_async.grammars.vocabulary import WORD, GrammarVocabulary, shorten_error
from toka_async.grammars.workers import Workers

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

logger = logging.getLogger(__name__)

FEW = 4  # rows; so many take less time than it takes to wake threads
TEAM = 2  # threads of the library that one of ours wakes: ours wait for each other at the interpreter's lock
MOST_THREADS = 16


def count_mask_threads(num_sharing: int) -> int:
    """Counts the threads in which each of `num_sharing` ranks of a machine makes masks, beside its own."""
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // num_sharing - 2))


@dataclass(slots=True, frozen=True)
class GrammarRow:
    """What is known of a row when it is admitted. generated: int32, tokens of its output so far."""

    slot: int
    grammar: str
    generated: Int32
    min_tokens: int


@dataclass(slots=True)
class MatchedRows:
    """Rows on their way: slots int32 [r], all different, and which of each slot's rows, int64 [r].

    teams: int64, the places of each team's rows. runs: those of each team that go on. new: places of those that have no
    token. change: number of the last change of any row when they were found.
    """

    slots: Int32
    numbers: Int64
    teams: tuple[Int64, ...]
    runs: list[TeamRows] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    change: int = -1


Drawn = tuple[MatchedRows, Int32]  # rows and the token that each drew


class RowMatchers:
    """The rows with a grammar, by slot. A row stops once it has drawn an end token, or has failed.

    Work is by column: Python touches an object of each row only to hand its matcher to the library.

    Args:
        num_threads: of the library, in which masks are made; there are as many lanes.
    """

    def __init__(self, vocabulary: GrammarVocabulary, max_seqs: int, num_threads: int) -> None:
        self._vocabulary = vocabulary
        self._num_threads = num_threads
        self._num_teams = -(-num_threads // TEAM)
        # A team's thread, and the library's, which do what that one asks for; all are made when they are needed.
        self._threads = Workers(self._num_teams)
        self._executors: list[LLExecutor | None] = [None] * self._num_teams
        self._originals = Originals(vocabulary, num_threads, ThreadPoolExecutor(num_threads, "grammars"))
        self._admitted: dict[int, GrammarRow] = {}  # that have not started
        self._num_rows = 0
        self._change = 0  # number of the last change to which rows exist, go on or have a token
        # By slot.
        self._has_row: Bool = np.zeros(max_seqs, np.bool_)
        self._number: Int64 = np.zeros(max_seqs, np.int64)  # of its row; another one for each
        self._matchers: npt.NDArray[np.object_] = np.full(max_seqs, None, object)  # None: the row has stopped
        self._goes_on: Bool = np.zeros(max_seqs, np.bool_)
        self._has_failed: Bool = np.zeros(max_seqs, np.bool_)
        self._lane: npt.NDArray[np.uint8] = np.zeros(max_seqs, np.uint8)
        self._grammar: npt.NDArray[np.object_] = np.full(max_seqs, None, object)
        self._first_mask: npt.NDArray[np.object_] = np.full(max_seqs, None, object)  # its grammar's
        self._num_tokens: Int64 = np.zeros(max_seqs, np.int64)
        self._min_tokens: Int64 = np.zeros(max_seqs, np.int64)
        ends = np.asarray(sorted(vocabulary.end_ids), np.int64)
        self._end_ids = ends[(ends >= 0) & (ends < vocabulary.num_tokens)]
        self._end_id = int(self._end_ids[0]) if self._end_ids.size else None
        self._is_end: Bool = np.isin(np.arange(vocabulary.num_tokens), self._end_ids)
        self.num_words = vocabulary.num_words

    def __len__(self) -> int:
        return self._num_rows

    def free(self, slots: Int32) -> None:
        """Forgets the slots' rows, if they have a grammar."""
        freed = slots[self._has_row[slots]]
        for slot in freed.tolist() if self._admitted else ():
            self._admitted.pop(slot, None)
        self._has_row[freed] = self._goes_on[freed] = False
        self._matchers[freed] = self._grammar[freed] = self._first_mask[freed] = None
        self._num_rows -= freed.size
        self._change += 1

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
        ends = np.cumsum(np.bincount(lanes // TEAM, minlength=self._num_teams))
        # A team's threads begin with equal parts, which mostly are their lanes.
        by_team = np.split(np.argsort(lanes, kind="stable"), ends[:-1])
        return MatchedRows(slots, self._number[slots], tuple(by_team))

    def advance(self, rows: MatchedRows, token_ids: Int32) -> None:
        """Advances each row by a token that it drew, unless it has stopped or its slot has another one."""
        if rows.slots.size <= FEW:
            for row in zip(rows.slots.tolist(), rows.numbers.tolist(), token_ids.tolist(), strict=True):
                self._advance_row(*row)
        else:
            list(self.fill_parts((), (), (rows, token_ids)))

    def _find_runs(self, rows: MatchedRows) -> list[TeamRows]:
        """Finds the rows that have not stopped and still have their slots, by team. Most steps change none."""
        if rows.change != self._change:
            goes_on = self._goes_on[rows.slots] & (self._number[rows.slots] == rows.numbers)
            has_token = self._num_tokens[rows.slots] > 0
            rows.new = np.flatnonzero(goes_on & ~has_token).tolist()
            found = [places[goes_on[places]] for places in rows.teams]
            rows.runs = [self._find_run(rows.slots[places], places, has_token[places]) for places in found]
            rows.change = self._change
        return rows.runs

    def _find_run(self, slots: Int32, places: Int64, has_token: Bool) -> TeamRows:
        matchers: list[LLMatcher] = self._matchers[slots].tolist()
        pairs = [*compress(zip(matchers, places.tolist(), strict=True), has_token.tolist())]
        return TeamRows(slots, places, matchers, pairs)

    def _note_tokens(self, runs: Sequence[TeamRows]) -> None:
        """Notes that rows get a token; `_note_advanced` follows."""
        slots = np.concatenate([run.slots for run in runs])
        if (self._num_tokens[slots] == 0).any():
            self._change += 1
        self._num_tokens[slots] += 1

    def _note_advanced(self, runs: Sequence[TeamRows], token_ids: Int32, failures: Iterable[Failure]) -> None:
        """Notes which rows have failed at their tokens, or stopped."""
        for failure in failures:
            self._note_error(*failure)
        for run in runs:
            slots = run.slots[self._is_end[token_ids[run.places]]]  # other places may have drawn anything
            if slots.size:
                self._stop(slots[self._goes_on[slots]])

    def _advance_row(self, slot: int, number: int, token_id: int) -> None:
        if not self._goes_on[slot] or self._number[slot] != number:
            return
        if not self._num_tokens[slot]:
            self._change += 1
        self._num_tokens[slot] += 1
        if not self._matchers[slot].consume_token(token_id):
            self._note_error(slot, self._matchers[slot].get_error())
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
        for rows, masks in zip(parts, self._run_teams(parts, tables, drawn), strict=True):
            goes_on = self._goes_on[rows.slots]
            masks[~goes_on] = -1
            held = goes_on & (self._num_tokens[rows.slots] < self._min_tokens[rows.slots])
            for place in np.flatnonzero(held).tolist():
                self._hold_ends(masks[place])
            yield np.flatnonzero(self._has_failed[rows.slots]).tolist()

    def _run_teams(self, parts: Sequence[MatchedRows], tables: Sequence[Int32], drawn: Drawn | None) -> Iterator[Int32]:
        """Advances rows and writes masks in the threads of all teams; yields the masks of each part when all are there.

        The masks of rows that have stopped or failed say nothing.
        """
        advanced = [] if drawn is None else self._find_runs(drawn[0])
        token_ids = np.empty(0, np.int32) if drawn is None else drawn[1]
        if advanced:
            self._note_tokens(advanced)
        asked = [self._find_runs(rows) for rows in parts]
        teams = [
            team
            for team in range(self._num_teams)
            if (advanced and advanced[team].matchers) or any(runs[team].pairs for runs in asked)
        ]
        failures: list[list[Failure]] = [[] for _ in (advanced, *parts)]  # of what advances, and of each part
        arrived = [count(1) for _ in tables] or [count(1)]
        complete: SimpleQueue[bool] = SimpleQueue()
        errors: list[BaseException] = []

        def work(team: int) -> None:
            remaining = iter(arrived)
            try:
                executor = self._find_executor(team)
                if advanced:
                    run = advanced[team]
                    failures[0] += advance(executor, run, token_ids[run.places].tolist())
                for masks, runs, failed in zip(tables, asked, failures[1:], strict=True):
                    failed += fill(executor, runs[team], masks, self._end_id)
                    if next(next(remaining)) == len(teams):
                        complete.put(True)
            except BaseException as error:
                errors.append(error)
            for arrive in remaining:
                if next(arrive) == len(teams):
                    complete.put(True)

        for team in teams:
            self._threads.submit(team, partial(work, team))
        for rows, masks in zip(parts, tables, strict=True):
            self._fill_new(rows, masks)
        for number in range(len(arrived)):
            if teams:
                complete.get()
            if errors:
                for _ in arrived[number + 1 :]:  # nobody writes to the tables any more after that
                    complete.get()
                raise errors[0]
            if advanced and not number:
                self._note_advanced(advanced, token_ids, failures[0])
            if tables:
                for failure in failures[1 + number]:
                    self._note_error(*failure)
                yield tables[number]

    def _fill_new(self, rows: MatchedRows, masks: Int32) -> None:
        """Writes the masks of rows without a token, which each grammar has once."""
        alike: dict[int, tuple[Int32, list[int]]] = {}
        for place, mask in zip(rows.new, self._first_mask[rows.slots[rows.new]].tolist(), strict=True):
            alike.setdefault(id(mask), (mask, []))[1].append(place)
        for mask, places in alike.values():
            masks[places] = mask

    def _fill_row(self, slot: int, mask: Int32) -> bool:
        """Returns whether the row has not failed."""
        if self._goes_on[slot] and self._num_tokens[slot]:
            self._matchers[slot].unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matchers[slot].is_error():
                self._note_error(slot, self._matchers[slot].get_error())
        elif self._goes_on[slot]:
            mask[:] = self._first_mask[slot]
        if not self._goes_on[slot]:
            mask.fill(-1)
        elif self._num_tokens[slot] < self._min_tokens[slot]:
            self._hold_ends(mask)
        return not self._has_failed[slot]

    def _hold_ends(self, mask: Int32) -> None:
        """Forbids end tokens, unless nothing else is allowed: a complete output cannot go on."""
        words, bits = self._end_ids // WORD, np.int32(1) << (self._end_ids % WORD).astype(np.int32)
        held = mask.copy()
        np.bitwise_and.at(held, words, ~bits)
        if held.any():
            mask[:] = held

    def _find_executor(self, team: int) -> LLExecutor:
        if (executor := self._executors[team]) is None:
            from llguidance import LLExecutor

            executor = self._executors[team] = LLExecutor(min(TEAM, self._num_threads - TEAM * team))
        return executor

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
                    self._note_error(row.slot, self._matchers[row.slot].get_error())
        self._admitted.clear()
        self._change += 1

    def _start(self, rows: Sequence[GrammarRow]) -> None:
        """Gives rows matchers; their grammars are compiled."""
        if not rows:
            return
        slots, num_rows = [row.slot for row in rows], Counter(row.grammar for row in rows)
        dealt = {grammar: self._originals.deal(grammar, number) for grammar, number in num_rows.items()}
        lanes, originals = zip(*(next(dealt[row.grammar], (0, None)) for row in rows), strict=True)
        self._num_tokens[slots] = [row.generated.size for row in rows]
        self._min_tokens[slots] = [row.min_tokens for row in rows]
        self._grammar[slots] = [row.grammar for row in rows]
        first_masks = {grammar: self._originals.find_first_mask(grammar) for grammar in num_rows}
        for row in rows:
            self._first_mask[row.slot] = first_masks[row.grammar]
        self._lane[slots] = lanes
        self._matchers[slots] = self._copy(lanes, originals)
        self._has_failed[slots] = fails = [original is None for original in originals]
        self._goes_on[slots] = [not failed for failed in fails]

    def _copy(self, lanes: Sequence[int], originals: Sequence[LLMatcher | None]) -> list[LLMatcher | None]:
        """Copies originals, many in the threads of their teams.

        A matcher grows with every token. Where one thread made them all, its allocator's lock would be all teams' lock.
        """
        if len(lanes) <= FEW:
            return _copy_all(originals)
        own: defaultdict[int, list[int]] = defaultdict(list)
        for place, lane in enumerate(lanes):
            own[lane // TEAM].append(place)
        matchers: list[LLMatcher | None] = [None] * len(lanes)
        copied: SimpleQueue[BaseException | None] = SimpleQueue()

        def work(places: list[int]) -> None:
            try:
                for place, matcher in zip(places, _copy_all([originals[place] for place in places]), strict=True):
                    matchers[place] = matcher
                copied.put(None)
            except BaseException as error:
                copied.put(error)

        for team, places in own.items():
            self._threads.submit(team, partial(work, places))
        for error in [copied.get() for _ in own]:
            if error is not None:
                raise error
        return matchers

    def _stop(self, slots: Int32 | int) -> None:
        self._goes_on[slots] = False
        self._matchers[slots] = None
        self._change += 1

    def _note_error(self, slot: int, words: str) -> None:
        """Ends a row, unless it has ended. words: of the library; empty: it does not say why."""
        if not self._goes_on[slot]:
            return
        error = shorten_error(words) or "it does not go on"
        self._has_failed[slot], self._goes_on[slot], self._matchers[slot] = True, False, None
        self._change += 1
        logger.warning("a grammar failed after %d tokens: %s", self._num_tokens[slot], error)
        if "panic" in error:  # the library leaves the shared lexer locked: no further row may copy this original
            self._originals.drop(self._grammar[slot], int(self._lane[slot]))


def _copy_all(originals: Sequence[LLMatcher | None]) -> list[LLMatcher | None]:
    return [None if original is None else original.deep_copy() for original in originals]
