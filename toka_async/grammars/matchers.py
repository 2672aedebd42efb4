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


@dataclass(slots=True, eq=False)
class MatchedRow:
    """A row on its way. original: number of the matcher that its own is a copy of.

    matcher: None if the row does not go on: it has drawn an end token, or it has an error, which says why.
    """

    matcher: LLMatcher | None
    original: int
    min_tokens: int
    num_tokens: int = 0
    error: str = ""
    drawn_by: int = -1  # number of the newest draw whose token the matcher may not have


@dataclass(slots=True)
class _Compiled:
    """A grammar's matchers, which never advance, with their numbers, and how many rows it has had.

    is_slow: compiling it took long.
    """

    originals: list[tuple[int, LLMatcher]] = field(default_factory=list)
    num_rows: int = 0
    is_slow: bool = False


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
        self._admitted: dict[int, GrammarRow] = {}  # that have not started
        self._rows: dict[int, MatchedRow] = {}
        self._has_row: Bool = np.zeros(max_seqs, np.bool_)
        self._original: Int32 = np.zeros(max_seqs, np.int32)  # by slot, of those that have a row
        ends = np.asarray(sorted(vocabulary.end_ids), np.int64)
        self._end_ids = ends[(ends >= 0) & (ends < vocabulary.num_tokens)]
        self.num_words = -(-vocabulary.num_tokens // WORD)

    def __len__(self) -> int:
        return len(self._rows) + len(self._admitted)

    def free(self, slots: Int32) -> None:
        """Forgets the slots' rows, if they have a grammar."""
        for slot in slots[self._has_row[slots]].tolist():
            if self._admitted.pop(slot, None) is None:
                del self._rows[slot]
            self._has_row[slot] = False

    def admit(self, rows: Sequence[GrammarRow]) -> None:
        """Takes new rows; the slots are free. They start when they are asked for: a grammar's first one compiles it."""
        for row in rows:
            self._admitted[row.slot] = row
            self._has_row[row.slot] = True

    def has_any(self, slots: Int32) -> bool:
        """Whether a row of these has a grammar."""
        return bool(self._has_row[slots].any())

    def find(self, slots: Int32) -> Int64:
        """Finds the places of rows with a grammar; those of one original are neighbours."""
        self._start_admitted()
        places = np.flatnonzero(self._has_row[slots])
        return places[np.argsort(self._original[slots[places]], kind="stable")]

    def take(self, slots: Int32) -> list[MatchedRow]:
        self._start_admitted()
        return [self._rows[slot] for slot in slots.tolist()]

    def advance(self, rows: Sequence[MatchedRow], token_ids: Int32) -> None:
        """Advances each row by a token that it drew."""
        # Thousands of rows a step: no objects are made for each, which the garbage collector would look through.
        going = [row for row in rows if row.matcher is not None]
        matchers = [row.matcher for row in rows if row.matcher is not None]
        if not going:
            return
        if len(going) < len(rows):
            token_ids = token_ids[[row.matcher is not None for row in rows]]
        taken = self._run().consume_token_par(list(zip(matchers, token_ids.tolist(), strict=True)))
        for row in going:
            row.num_tokens += 1
        for place in np.flatnonzero(np.isin(token_ids, self._end_ids)).tolist():
            if taken[place]:
                going[place].matcher = None
        if not all(taken):
            for row, is_taken in zip(going, taken, strict=True):
                if not is_taken:
                    self._note_error(row)

    def fill(self, rows: Sequence[MatchedRow], masks: Int32) -> list[int]:
        """Writes a mask of each row, int32 [r, num_words]: the bits of ids that it may draw, lowest first.

        A row that does not go on may draw anything. Returns the places of those with an error.
        """
        going = [place for place, row in enumerate(rows) if row.matcher is not None]
        matchers = [row.matcher for row in rows if row.matcher is not None]
        if len(going) < len(rows):
            masks.fill(-1)
        if going:
            asked = list(zip(matchers, going, strict=True))
            self._run().unsafe_compute_mask_ptr(asked, masks.ctypes.data, 4 * self.num_words, len(rows))
        for place, matcher in zip(going, matchers, strict=True):
            row = rows[place]
            if matcher.is_error():
                self._note_error(row)
                masks[place] = -1
            elif row.num_tokens < row.min_tokens:
                self._hold_ends(masks[place])
        return [place for place, row in enumerate(rows) if row.error]

    def _hold_ends(self, mask: Int32) -> None:
        """Forbids end tokens, unless nothing else is allowed: a complete output cannot go on."""
        words, bits = self._end_ids // WORD, np.int32(1) << (self._end_ids % WORD).astype(np.int32)
        held = mask.copy()
        np.bitwise_and.at(held, words, ~bits)
        if held.any():
            mask[:] = held

    def _start_admitted(self) -> None:
        for slot, row in self._admitted.items():
            started = self._rows[slot] = self._start(row)
            self._original[slot] = started.original
        self._admitted.clear()

    def _start(self, given: GrammarRow) -> MatchedRow:
        try:
            number, original = self._find_original(given.grammar)
        except GrammarError as error:
            logger.warning("a grammar cannot be used: %s", error)
            return MatchedRow(None, -1, given.min_tokens, error=str(error))
        matcher = original.deep_copy()
        row = MatchedRow(matcher, number, given.min_tokens, given.generated.size)
        if given.generated.size and not matcher.consume_tokens(given.generated.tolist()):  # before a preemption
            self._note_error(row)
        return row

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

    def _note_error(self, row: MatchedRow) -> None:
        assert row.matcher is not None
        row.error = shorten_error(row.matcher.get_error()) or "it does not go on"
        row.matcher = None
        logger.warning("a grammar failed after %d tokens: %s", row.num_tokens, row.error)
        if "panic" in row.error:  # the library leaves the shared lexer locked: no further row may copy this original
            for compiled in self._compiled.values():
                compiled.originals = [each for each in compiled.originals if each[0] != row.original]
