"""Follows rows through their grammars on a rank: which tokens each may draw next.

Rows of one grammar are copies of few compiled matchers, which Rust's threads advance and ask in parallel, without the
interpreter's lock. Copies share the lexer of their original behind a lock, so there are several originals, and rows of
one are neighbours. Knows slots and token ids; knows no requests and no torch.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Bool, Int32, Int64
from toka_async.grammars.lark import GrammarError
from toka_async.grammars.vocabulary import GrammarVocabulary, shorten_error

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

logger = logging.getLogger(__name__)

MOST_GRAMMARS = 256  # that are kept compiled
ROWS_EACH = 8  # of a grammar, after which it is compiled once more
LONG = 0.02  # seconds of a processor; a grammar that takes longer is compiled once: all rows wait meanwhile
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
class MatchedRows:
    """Rows on their way: slots int32 [r], all different, and which of each slot's rows, int64 [r]."""

    slots: Int32
    numbers: Int64


@dataclass(slots=True)
class _Compiled:
    """A grammar's matchers, which never advance, with their numbers, and how many rows it has had.

    is_slow: compiling it took long.
    """

    originals: list[tuple[int, LLMatcher]] = field(default_factory=list)
    num_rows: int = 0
    is_slow: bool = False


class RowMatchers:
    """The rows with a grammar, by slot. A row stops once it has drawn an end token, or has failed.

    Work is by column: Python touches an object of each row only to hand its matcher to the library.

    Args:
        num_threads: of Rust, which masks are made in.
    """

    def __init__(self, vocabulary: GrammarVocabulary, max_seqs: int, num_threads: int) -> None:
        self._vocabulary = vocabulary
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None  # threads are started when they are needed
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._num_compiled = 0
        self._admitted: dict[int, GrammarRow] = {}  # that have not started
        self._num_rows = 0
        # By slot.
        self._has_row: Bool = np.zeros(max_seqs, np.bool_)
        self._number: Int64 = np.zeros(max_seqs, np.int64)  # of its row; another one for each
        self._matchers: npt.NDArray[np.object_] = np.full(max_seqs, None, object)  # None: the row has stopped
        self._goes_on: Bool = np.zeros(max_seqs, np.bool_)
        self._has_failed: Bool = np.zeros(max_seqs, np.bool_)
        self._original: npt.NDArray[np.uint16] = np.zeros(max_seqs, np.uint16)  # what its matcher is a copy of
        self._num_tokens: Int64 = np.zeros(max_seqs, np.int64)
        self._min_tokens: Int64 = np.zeros(max_seqs, np.int64)
        ends = np.asarray(sorted(vocabulary.end_ids), np.int64)
        self._end_ids = ends[(ends >= 0) & (ends < vocabulary.num_tokens)]
        self.num_words = -(-vocabulary.num_tokens // WORD)

    def __len__(self) -> int:
        return self._num_rows

    def free(self, slots: Int32) -> None:
        """Forgets the slots' rows, if they have a grammar."""
        freed = slots[self._has_row[slots]]
        for slot in freed.tolist() if self._admitted else ():
            self._admitted.pop(slot, None)
        self._has_row[freed] = self._goes_on[freed] = False
        self._matchers[freed] = None
        self._num_rows -= freed.size

    def admit(self, rows: Sequence[GrammarRow]) -> None:
        """Takes new rows; the slots are free. They start when they are asked for: a grammar's first one compiles it."""
        for row in rows:
            self._admitted[row.slot] = row
            self._has_row[row.slot] = True
            self._number[row.slot] += 1
        self._num_rows += len(rows)

    def has_any(self, slots: Int32) -> bool:
        """Whether a row of these has a grammar."""
        return bool(self._has_row[slots].any())

    def find(self, slots: Int32) -> Int64:
        """Finds the places of rows with a grammar; those of one original are neighbours."""
        self._start_admitted()
        places = np.flatnonzero(self._has_row[slots])
        return places[np.argsort(self._original[slots[places]], kind="stable")]

    def take(self, slots: Int32) -> MatchedRows:
        """Takes the slots' rows, each of which has a grammar."""
        self._start_admitted()
        return MatchedRows(slots, self._number[slots])

    def advance(self, rows: MatchedRows, token_ids: Int32) -> None:
        """Advances each row by a token that it drew, unless it has stopped or its slot has another one."""
        slots = rows.slots
        going = self._goes_on[slots] & (self._number[slots] == rows.numbers)
        if not going.all():
            slots, token_ids = slots[going], token_ids[going]
        if not slots.size:
            return
        pairs = list(zip(self._matchers[slots].tolist(), token_ids.tolist(), strict=True))
        taken = np.array(self._run().consume_token_par(pairs))
        self._num_tokens[slots] += 1
        self._stop(slots[taken & np.isin(token_ids, self._end_ids)])
        for slot in slots[~taken].tolist():
            self._note_error(slot)

    def fill(self, rows: MatchedRows, masks: Int32) -> list[int]:
        """Writes a mask of each row, int32 [r, num_words]: the bits of ids that it may draw, lowest first.

        The slots have these rows. One that has stopped may draw anything. Returns the places of those that have failed.
        """
        slots = rows.slots
        places = np.flatnonzero(self._goes_on[slots])
        if places.size < slots.size:
            masks[~self._goes_on[slots]] = -1
        if places.size:
            pairs = list(zip(self._matchers[slots[places]].tolist(), places.tolist(), strict=True))
            self._run().unsafe_compute_mask_ptr(pairs, masks.ctypes.data, 4 * self.num_words, slots.size)
            for place in self._find_suspects(places, masks).tolist():
                if self._matchers[slots[place]].is_error():
                    self._note_error(int(slots[place]))
                    masks[place] = -1
            held = self._goes_on[slots] & (self._num_tokens[slots] < self._min_tokens[slots])
            for place in np.flatnonzero(held).tolist():
                self._hold_ends(masks[place])
        failed: list[int] = np.flatnonzero(self._has_failed[slots]).tolist()
        return failed

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

    def _start_admitted(self) -> None:
        for row in self._admitted.values():
            self._start(row)
        self._admitted.clear()

    def _start(self, row: GrammarRow) -> None:
        slot = row.slot
        self._num_tokens[slot], self._min_tokens[slot] = row.generated.size, row.min_tokens
        self._has_failed[slot] = False
        try:
            number, original = self._find_original(row.grammar)
        except GrammarError as error:
            logger.warning("a grammar cannot be used: %s", error)
            self._has_failed[slot] = True
            return
        self._original[slot] = number % (1 << 16)
        self._matchers[slot] = matcher = original.deep_copy()
        self._goes_on[slot] = True
        if row.generated.size and not matcher.consume_tokens(row.generated.tolist()):  # before a preemption
            self._note_error(slot)

    def _find_original(self, grammar: str) -> tuple[int, LLMatcher]:
        """Raises GrammarError."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = _Compiled()
        wanted = 1 if compiled.is_slow else min(compiled.num_rows // ROWS_EACH + 1, 2 * self._num_threads)
        if len(compiled.originals) < wanted:
            began = thread_time()
            compiled.originals.append((self._num_compiled, self._vocabulary.compile(grammar)))
            compiled.is_slow |= thread_time() - began > LONG
            self._num_compiled += 1
        self._compiled[grammar] = compiled
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > MOST_GRAMMARS:
            self._compiled.popitem(last=False)
        compiled.num_rows += 1
        return compiled.originals[compiled.num_rows % len(compiled.originals)]

    def _run(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        return self._executor

    def _stop(self, slots: Int32) -> None:
        self._goes_on[slots] = False
        self._matchers[slots] = None

    def _note_error(self, slot: int) -> None:
        error = shorten_error(self._matchers[slot].get_error()) or "it does not go on"
        self._has_failed[slot], self._goes_on[slot], self._matchers[slot] = True, False, None
        logger.warning("a grammar failed after %d tokens: %s", self._num_tokens[slot], error)
        if "panic" in error:  # the library leaves the shared lexer locked: no further row may copy this original
            broken = self._original[slot]
            for compiled in self._compiled.values():
                compiled.originals = [each for each in compiled.originals if each[0] % (1 << 16) != broken]
