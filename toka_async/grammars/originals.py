"""Compiles grammars on a rank: the originals, of which rows' matchers are copies.

Copies share the lexer of their original behind a lock, so that two threads at copies of one original wait for each
other. So there are lanes, each mostly of one thread, which has at most one original of a grammar. Knows no rows.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice
from time import thread_time
from typing import TYPE_CHECKING

from toka_async.arrays import Int32
from toka_async.grammars.errors import GrammarError
from toka_async.grammars.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

MOST_GRAMMARS = 256  # that are kept compiled
ROWS_EACH = 8  # of a grammar, after which it is compiled for one more lane
LONG = 0.02  # seconds of a processor; a grammar that takes longer is compiled once: all rows wait meanwhile


@dataclass(slots=True)
class _Compiled:
    """A grammar's originals, which never advance, by lane, and how many rows it has had.

    first_mask: int32 [num_words], of a row without a token. is_slow: compiling it took long. is_bad: it cannot be used.
    """

    originals: dict[int, LLMatcher] = field(default_factory=dict)
    first_mask: Int32 | None = None
    num_rows: int = 0
    is_slow: bool = False
    is_bad: bool = False


@dataclass(slots=True, frozen=True)
class _First:
    """The first original of a grammar, and what is known of it since."""

    original: LLMatcher
    mask: Int32
    is_slow: bool


class Originals:
    """Originals by grammar and lane. threads: that compile, without the interpreter's lock."""

    def __init__(self, vocabulary: GrammarVocabulary, num_lanes: int, threads: ThreadPoolExecutor) -> None:
        self._vocabulary = vocabulary
        self._num_lanes = num_lanes
        self._threads = threads
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._under_way: dict[str, Future[_First]] = {}  # first originals, since `expect`
        self._next_lane = self._num_dealt = 0

    def expect(self, grammar: str) -> None:
        """Begins to compile a grammar if it is new; `add_rows` follows."""
        if grammar not in self._compiled and grammar not in self._under_way:
            self._under_way[grammar] = self._threads.submit(self._compile_first, grammar)

    def add_rows(self, num_rows: Counter[str]) -> None:
        """Compiles grammars for so many more rows: first each that is new, then more originals of those with many."""
        for grammar, number in num_rows.items():
            compiled = self._compiled.setdefault(grammar, _Compiled())
            self._compiled.move_to_end(grammar)
            compiled.num_rows += number
        for grammar in num_rows:
            compiled = self._compiled[grammar]
            if compiled.originals or compiled.is_bad:
                continue
            under_way = self._under_way.get(grammar)
            try:
                first = under_way.result() if under_way else self._compile_first(grammar)
            except GrammarError as error:
                compiled.is_bad = True
                logger.info("a grammar cannot be used: %s", error)  # the server says so, too
            except Exception:  # it ends its rows, and not the rank
                compiled.is_bad = True
                logger.exception("the library fails at a grammar")
            else:
                compiled.first_mask, compiled.is_slow = first.mask, first.is_slow
                self._place(compiled, first.original)
        self._under_way.clear()
        for grammar in num_rows:
            compiled = self._compiled[grammar]
            most = 1 if compiled.is_slow else min(-(-compiled.num_rows // ROWS_EACH), self._num_lanes)
            further = most - len(compiled.originals) if compiled.originals else 0
            for done in [self._threads.submit(self._vocabulary.compile, grammar) for _ in range(further)]:
                self._place(compiled, done.result())
        while len(self._compiled) > max(MOST_GRAMMARS, len(num_rows)):
            self._compiled.popitem(last=False)

    def deal(self, grammar: str, number: int) -> Iterator[tuple[int, LLMatcher]]:
        """Deals originals to so many rows that were added, each with its lane; none: the grammar cannot be used."""
        originals = [*self._compiled[grammar].originals.items()]
        if not originals:
            return
        first = self._num_dealt % len(originals)
        self._num_dealt += number
        yield from islice(cycle(originals), first, first + number)

    def find_first_mask(self, grammar: str) -> Int32 | None:
        """Finds the mask of rows without a token, int32 [num_words], once rows were added.

        None: the grammar cannot be used.
        """
        return self._compiled[grammar].first_mask

    def drop(self, grammar: str, lane: int) -> None:
        """Deals an original no more."""
        if (compiled := self._compiled.get(grammar)) is not None:
            compiled.originals.pop(lane, None)

    def _compile_first(self, grammar: str) -> _First:
        """Compiles an original, and asks a copy for its mask. Raises GrammarError."""
        began = thread_time()
        original = self._vocabulary.compile(grammar)
        is_slow = thread_time() - began > LONG
        return _First(original, self._vocabulary.compute_first_mask(original), is_slow)

    def _place(self, compiled: _Compiled, original: LLMatcher) -> None:
        """Gives a grammar's original to a lane that has none of it, in turn."""
        while self._next_lane in compiled.originals:
            self._next_lane = (self._next_lane + 1) % self._num_lanes
        compiled.originals[self._next_lane] = original
        self._next_lane = (self._next_lane + 1) % self._num_lanes
