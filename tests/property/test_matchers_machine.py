"""Rows of a step, all at once in the threads of teams, against one matcher after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from llguidance import LLMatcher

from tests.cases.grammars import END_IDS, NUM_TOKENS, make_vocabulary
from toka_async.arrays import Int32
from toka_async.grammars.matchers import GrammarRow, MatchedRows, RowMatchers

MAX_SEQS = 14
GRAMMARS = ("start: /[ab]{0,6}/", 'start: "a" /[bc]*/ "d"', 'start: "abab" | "abcd"')


@dataclass(slots=True, eq=False)
class Model:
    """What is expected of a row. own: its matcher; None once it has stopped or failed."""

    own: LLMatcher | None
    has_failed: bool = False
    ids: list[int] = field(default_factory=list)

    def allow(self) -> Int32:
        mask = np.full(-(-NUM_TOKENS // 32), -1, np.int32)
        if self.own is not None:
            self.own.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return mask

    def take(self, token: int) -> None:
        if self.own is None:
            return
        if not self.own.consume_token(token):
            self.own, self.has_failed = None, True
        elif token in END_IDS:
            self.own = None


class MatchersMachine(RuleBasedStateMachine):
    """Rows start together and apart, draw in any company, draw what they may not, stop, and leave."""

    @initialize(num_threads=st.integers(1, 3))
    def start(self, num_threads: int) -> None:
        self.matchers = RowMatchers(make_vocabulary(), MAX_SEQS, num_threads)
        self.rows: dict[int, Model] = {}
        self.taken: dict[tuple[int, ...], MatchedRows] = {}  # since rows came or left, as steps take them

    @rule(data=st.data(), grammar=st.sampled_from(GRAMMARS), number=st.integers(1, MAX_SEQS))
    def admit(self, data: st.DataObject, grammar: str, number: int) -> None:
        """Some rows have tokens already, as after a preemption."""
        free = [slot for slot in range(MAX_SEQS) if slot not in self.rows][:number]
        admitted = []
        for slot in free:
            row = Model(make_vocabulary().compile(grammar))
            generated = [self.choose(data, row)] if data.draw(st.integers(0, 5)) == 0 else []
            for token in generated:
                row.take(token)
            # A preempted row has not ended, since it would not have come back.
            if row.own is None:
                row, generated = Model(make_vocabulary().compile(grammar)), []
            self.rows[slot] = row
            admitted.append(GrammarRow(slot, grammar, np.array(generated, np.int32), 0))
        self.matchers.admit(admitted)
        self.taken.clear()

    def choose(self, data: st.DataObject, row: Model) -> int:
        """One of few that are allowed, or perhaps none of them."""
        allowed = np.flatnonzero(np.unpackbits(row.allow().view(np.uint8), bitorder="little")).tolist()
        return data.draw(st.sampled_from([*allowed[:3], 7])) if data.draw(st.booleans()) else allowed[0]

    def some(self, data: st.DataObject) -> list[int]:
        """Mostly all or nearly all, as few rows need no threads."""
        if data.draw(st.booleans()):
            return sorted(self.rows)
        left = data.draw(st.sets(st.sampled_from(sorted(self.rows)), max_size=len(self.rows) - 1))
        return sorted(set(self.rows) - left)

    def take(self, slots: list[int]) -> MatchedRows:
        if tuple(slots) not in self.taken:
            self.taken[tuple(slots)] = self.matchers.take(np.array(slots, np.int32))
        return self.taken[tuple(slots)]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), cut=st.integers(0, MAX_SEQS))
    def step(self, data: st.DataObject, cut: int) -> None:
        """Some rows draw; then others are asked, in two parts."""
        drew, asked = self.some(data), self.some(data)
        tokens = [self.choose(data, self.rows[slot]) for slot in drew]
        drawn = self.take(drew), np.array(tokens, np.int32)
        for slot, token in zip(drew, tokens, strict=True):
            self.rows[slot].take(token)
        parts = [part for part in (asked[:cut], asked[cut:]) if part]
        tables = [np.zeros((len(part), self.matchers.num_words), np.int32) for part in parts]
        taken = [self.take(part) for part in parts]
        filled = self.matchers.fill_parts(taken, tables, drawn)
        for part, table, failed in zip(parts, tables, filled, strict=True):
            assert failed == [place for place, slot in enumerate(part) if self.rows[slot].has_failed]
            for slot, mask in zip(part, table, strict=True):
                np.testing.assert_array_equal(mask, self.rows[slot].allow())

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        drew = self.some(data)
        tokens = [self.choose(data, self.rows[slot]) for slot in drew]
        self.matchers.advance(self.take(drew), np.array(tokens, np.int32))
        for slot, token in zip(drew, tokens, strict=True):
            self.rows[slot].take(token)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        left = self.some(data)
        self.matchers.free(np.array(left, np.int32))
        for slot in left:
            del self.rows[slot]
        self.taken.clear()

    @invariant()
    def rows_are_known(self) -> None:
        if hasattr(self, "rows"):
            assert self.matchers.find(np.arange(MAX_SEQS, dtype=np.int32)).tolist() == sorted(self.rows)


MatchersMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestMatchers = MatchersMachine.TestCase
