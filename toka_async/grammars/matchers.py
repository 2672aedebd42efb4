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
from operator import methodcaller
from typing import TYPE_CHECKING

import numpy as np

from toka_async.arrays import Bool, Int32, Int64
from toka_async.grammars.lark import GrammarError
from toka_async.grammars.vocabulary import GrammarVocabulary, shorten_error

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

logger = logging.getLogger(__name__)

MOST_GRAMMARS = 256  # that are kept compiled
ROWS_EACH = 8  # of a grammar, after which it is compiled once more
MOST_THREADS = 24
WORD = 32  # ids of a word of a mask
HAS_FAILED = methodcaller("is_error")


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
    """Rows with a grammar, one a slot: int32 [r], int64 [r]. lives: which of a slot's rows, one after the other."""

    slots: Int32
    lives: Int64

    def __len__(self) -> int:
        return self.slots.size


@dataclass(slots=True)
class _Compiled:
    """A grammar's matchers, which never advance, with their numbers, and how many rows it has had."""

    originals: list[tuple[int, LLMatcher]] = field(default_factory=list)
    num_rows: int = 0


class RowMatchers:
    """The rows with a grammar, by slot.

    Args:
        num_threads: of Rust, which masks are made in.
    """

    def __init__(self, vocabulary: GrammarVocabulary, max_seqs: int, num_threads: int) -> None:
        self._vocabulary = vocabulary
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None  # threads are started when they are needed
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._num_compiled = 0
        # By slot. A row goes on until it has drawn an end, or its grammar fails. original: which one it is a copy of.
        self._has_row: Bool = np.zeros(max_seqs, np.bool_)
        self._goes_on: Bool = np.zeros(max_seqs, np.bool_)
        self._matchers = np.full(max_seqs, None, np.object_)
        self._original = np.zeros(max_seqs, np.int32)
        self._num_tokens = np.zeros(max_seqs, np.int32)
        self._min_tokens = np.zeros(max_seqs, np.int32)
        self._lives = np.zeros(max_seqs, np.int64)
        self.errors: dict[int, str] = {}  # of slots: why the row cannot go on
        ends = np.asarray(sorted(vocabulary.end_ids), np.int64)
        self._end_ids = ends[(ends >= 0) & (ends < vocabulary.num_tokens)]
        self.num_words = -(-vocabulary.num_tokens // WORD)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._has_row))

    def free(self, slots: Int32) -> None:
        """Forgets the slots' rows, if they have a grammar."""
        held = slots[self._has_row[slots]]
        self._has_row[held] = self._goes_on[held] = False
        self._matchers[held] = None
        self._lives[held] += 1
        if self.errors:
            for slot in held.tolist():
                self.errors.pop(slot, None)

    def admit(self, rows: Sequence[GrammarRow]) -> None:
        """Takes new rows. A grammar's first one compiles it. The slots are free."""
        for row in rows:
            self._has_row[row.slot] = True
            self._num_tokens[row.slot] = row.generated.size
            self._min_tokens[row.slot] = row.min_tokens
            self._start(row)

    def find(self, slots: Int32) -> Int64:
        """Finds the places of rows with a grammar."""
        return np.flatnonzero(self._has_row[slots])

    def take(self, slots: Int32) -> MatchedRows:
        return MatchedRows(slots, self._lives[slots])

    def going_on(self, rows: MatchedRows) -> Bool:
        """Tells of each row whether it is there, has drawn no end and has not failed."""
        going: Bool = self._goes_on[rows.slots] & (self._lives[rows.slots] == rows.lives)
        return going

    def advance(self, rows: MatchedRows, token_ids: Int32) -> None:
        """Advances each row by a token that it drew."""
        going = np.flatnonzero(self.going_on(rows))
        if not going.size:
            return
        going = self._order(rows.slots, going)
        slots, token_ids = rows.slots[going], token_ids[going]
        pairs = list(zip(self._matchers[slots].tolist(), token_ids.tolist(), strict=True))
        taken = np.asarray(self._run().consume_token_par(pairs), np.bool_)
        self._num_tokens[slots] += 1
        self._goes_on[slots] = ~np.isin(token_ids, self._end_ids)
        for slot in slots[~taken].tolist():
            self._note_error(slot)

    def fill(self, rows: MatchedRows, masks: Int32) -> list[int]:
        """Writes a mask of each row, int32 [r, num_words]: the bits of ids that it may draw, lowest first.

        A row that cannot go on may draw anything. Returns the places of rows whose grammar failed.
        """
        goes_on = self.going_on(rows)
        masks[~goes_on] = -1
        going = self._order(rows.slots, np.flatnonzero(goes_on))
        slots = rows.slots[going]
        matchers: list[LLMatcher] = self._matchers[slots].tolist()
        if matchers:
            asked = list(zip(matchers, going.tolist(), strict=True))
            self._run().unsafe_compute_mask_ptr(asked, masks.ctypes.data, 4 * self.num_words, len(rows))
        has_failed = np.fromiter(map(HAS_FAILED, matchers), np.bool_, len(matchers))
        for slot in slots[has_failed].tolist():
            self._note_error(slot)
        masks[going[has_failed]] = -1
        held = ~has_failed & (self._num_tokens[slots] < self._min_tokens[slots])
        for place in going[held].tolist():
            self._hold_ends(masks[place])
        return [place for place, slot in enumerate(rows.slots.tolist()) if slot in self.errors] if self.errors else []

    def _order(self, slots: Int32, places: Int64) -> Int64:
        """Sorts places of rows so that copies of one original, which share a lock, are neighbours."""
        return places[np.argsort(self._original[slots[places]], kind="stable")]

    def _hold_ends(self, mask: Int32) -> None:
        """Forbids end tokens, unless nothing else is allowed: a complete output cannot go on."""
        words, bits = self._end_ids // WORD, np.int32(1) << (self._end_ids % WORD).astype(np.int32)
        held = mask.copy()
        np.bitwise_and.at(held, words, ~bits)
        if held.any():
            mask[:] = held

    def _start(self, row: GrammarRow) -> None:
        try:
            self._original[row.slot], original = self._find_original(row.grammar)
        except GrammarError as error:
            logger.warning("a grammar cannot be used: %s", error)
            self.errors[row.slot] = str(error)
            return
        matcher = original.deep_copy()
        self._matchers[row.slot], self._goes_on[row.slot] = matcher, True
        if row.generated.size and not matcher.consume_tokens(row.generated.tolist()):  # before a preemption
            self._note_error(row.slot)

    def _find_original(self, grammar: str) -> tuple[int, LLMatcher]:
        """Raises GrammarError."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = _Compiled()
        wanted = min(compiled.num_rows // ROWS_EACH + 1, 2 * self._num_threads)
        if len(compiled.originals) < wanted:
            compiled.originals.append((self._num_compiled, self._vocabulary.compile(grammar)))
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

    def _note_error(self, slot: int) -> None:
        error = shorten_error(self._matchers[slot].get_error()) or "it does not go on"
        self.errors[slot], self._goes_on[slot] = error, False
        logger.warning("a grammar failed after %d tokens: %s", self._num_tokens[slot], error)
        if "panic" in error:  # the library leaves the shared lexer locked: no further row may copy this original
            broken = self._original[slot]
            for compiled in self._compiled.values():
                compiled.originals = [each for each in compiled.originals if each[0] != broken]
