"""The tokens that running sequences have generated, in blocks, until they are sent.

A column per sequence would be as wide as the longest one; chained blocks take only what the tokens need. Knows
sequences by their rows and nothing else of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Bool, Float32, Int32
from toka_async.control import DEFAULT_VERSION

BLOCK = 64

Column = npt.NDArray[Any]
Span = tuple[int, str]  # where tokens of a version of the weights end, and the version
NO_FLOATS: Float32 = np.empty(0, np.float32)
NO_INTS: Int32 = np.empty(0, np.int32)


@dataclass(slots=True, frozen=True, eq=False)
class TokenColumns:
    """Tokens of rows, one row after the other.

    token_ids: [t]. logprobs: [t], or [0] where nobody asked. kept, masses: [t], what filters keep, 0 and 1 where there
    are none; [0] where nobody asked. version: of the weights that generated all tokens behind the rows' spans. spans:
    of rows, by their places, in order; of those with tokens of several versions.
    """

    token_ids: Int32
    logprobs: Float32 = field(default_factory=lambda: NO_FLOATS)
    kept: Int32 = field(default_factory=lambda: NO_INTS)
    masses: Float32 = field(default_factory=lambda: NO_FLOATS)
    version: str = DEFAULT_VERSION
    spans: Mapping[int, Sequence[Span]] = field(default_factory=dict)

    def take(self, tokens: slice | Bool, rows: Sequence[int]) -> TokenColumns:
        """The tokens at some places, which are all tokens of `rows`."""
        has_kept = bool(self.kept.size)
        return TokenColumns(
            self.token_ids[tokens],
            self.logprobs[tokens] if self.logprobs.size else self.logprobs,
            self.kept[tokens] if has_kept else self.kept,
            self.masses[tokens] if has_kept else self.masses,
            self.version,
            {place: self.spans[row] for place, row in enumerate(rows) if row in self.spans} if self.spans else {},
        )

    def cut(self, count: int) -> TokenColumns:
        """The first tokens of a single row."""
        made = self.take(slice(0, count), ())
        spans = self.spans.get(0, ())
        whole = [span for span in spans if span[0] < count]
        part = [(count, version) for _, version in spans[len(whole) : len(whole) + 1]]
        return replace(made, spans={0: whole + part}) if spans else made


class TokenLog:
    """Appends one token to many logs at a time; takes many whole logs at a time.

    version: of the weights that generate what is appended.
    """

    def __init__(self, num_seqs: int) -> None:
        self.count = np.zeros(num_seqs, dtype=np.int32)  # tokens in a sequence's log
        self.version = DEFAULT_VERSION
        self._head = np.full(num_seqs, -1, dtype=np.int32)  # its newest block
        self._tokens = np.zeros((num_seqs, BLOCK), dtype=np.int32)
        self._logprobs = np.zeros((num_seqs, BLOCK), dtype=np.float32)
        # What filters keep; they have no blocks until the first one comes.
        self._kept = np.zeros((0, BLOCK), dtype=np.int32)
        self._masses = np.zeros((0, BLOCK), dtype=np.float32)
        self._spans: dict[int, list[Span]] = {}  # of older versions
        self._previous = np.full(num_seqs, -1, dtype=np.int32)
        self._free = list(range(num_seqs - 1, -1, -1))

    def change_version(self, version: str) -> None:
        """From now on, tokens are of this version of the weights."""
        for seq in np.flatnonzero(self.count).tolist():
            self._end_span(seq, self.version)
        self.version = version

    def _end_span(self, seq: int, version: str) -> None:
        """All tokens of a sequence behind its spans are of a version."""
        spans, count = self._spans.setdefault(seq, []), int(self.count[seq])
        if spans and spans[-1][1] == version:
            spans[-1] = (count, version)
        elif not spans or spans[-1][0] < count:
            spans.append((count, version))

    def resize(self, num_seqs: int) -> None:
        more = num_seqs - self.count.size
        self.count = np.concatenate([self.count, np.zeros(more, np.int32)])
        self._head = np.concatenate([self._head, np.full(more, -1, np.int32)])

    def append(
        self,
        seqs: Int32,
        tokens: Int32,
        logprobs: Float32 | None,
        kept: Int32 | None = None,
        masses: Float32 | None = None,
    ) -> None:
        """Append a token to each of the sequences, which are distinct.

        None stands for zeros, in `masses` for ones.
        """
        offsets = self.count[seqs] % BLOCK
        new = seqs[offsets == 0]
        if new.size:
            blocks = self._take_blocks(new.size)
            self._previous[blocks] = self._head[new]
            self._head[new] = blocks
        heads = self._head[seqs]
        self._tokens[heads, offsets] = tokens
        self._logprobs[heads, offsets] = 0.0 if logprobs is None else logprobs
        if kept is not None or len(self._kept):
            self._widen()
            self._kept[heads, offsets] = 0 if kept is None else kept
            self._masses[heads, offsets] = 1.0 if masses is None else masses
        self.count[seqs] += 1

    def restore(self, seq: int, columns: TokenColumns) -> None:
        """Fill an empty log with what `take` returned of it."""
        assert self.count[seq] == 0
        num = columns.token_ids.size
        for start in range(0, num, BLOCK):
            block = int(self._take_blocks(1)[0])
            part, filled = slice(start, start + BLOCK), min(BLOCK, num - start)
            self._tokens[block, :filled] = columns.token_ids[part]
            self._logprobs[block, :filled] = columns.logprobs[part]
            if len(self._kept):
                self._kept[block, :filled] = columns.kept[part] if columns.kept.size else 0
                self._masses[block, :filled] = columns.masses[part] if columns.kept.size else 1
            self._previous[block] = self._head[seq]
            self._head[seq] = block
        self.count[seq] = num
        if spans := columns.spans.get(0):
            self._spans[seq] = list(spans)
        if num and columns.version != self.version:
            self._end_span(seq, columns.version)

    def take(self, seqs: Int32, scored: bool = True) -> tuple[Int32, TokenColumns]:
        """Empty logs; returns counts [seqs], and tokens in order, with log-probs if `scored`."""
        counts = self.count[seqs]
        total = int(counts.sum())
        same = counts.size > 1 and bool((counts == counts[0]).all())

        def gather(table: Column) -> Column:
            values = np.empty(total if len(table) else 0, table.dtype)
            if values.size:
                (self._gather_same if same else self._gather)(seqs, counts, table, values)
            return values

        spans = {}
        if self._spans:
            spans = {place: self._spans[seq] for place, seq in enumerate(seqs.tolist()) if seq in self._spans}
        columns = TokenColumns(
            gather(self._tokens),
            gather(self._logprobs) if scored else NO_FLOATS,
            gather(self._kept) if scored else NO_INTS,
            gather(self._masses) if scored else NO_FLOATS,
            self.version,
            spans,
        )
        self.drop(seqs)
        return counts, columns

    def drop(self, seqs: Int32) -> None:
        blocks = self._head[seqs]
        blocks = blocks[blocks >= 0]
        while blocks.size:
            self._free.extend(blocks.tolist())
            blocks = self._previous[blocks]
            blocks = blocks[blocks >= 0]
        self.count[seqs] = 0
        self._head[seqs] = -1
        for seq in seqs.tolist() if self._spans else ():
            self._spans.pop(seq, None)

    def _widen(self) -> None:
        """Make blocks for what filters keep, one for each block of tokens."""
        missing = len(self._tokens) - len(self._kept)
        if missing:
            self._kept = np.concatenate([self._kept, np.zeros((missing, BLOCK), np.int32)])
            self._masses = np.concatenate([self._masses, np.ones((missing, BLOCK), np.float32)])

    def _gather_same(self, seqs: Int32, counts: Int32, table: Column, out: Column) -> None:
        """Copy logs of the same length, whole blocks at a time: many samples that end together have such."""
        rows, blocks, end = out.reshape(counts.size, -1), self._head[seqs], int(counts[0])
        while end > 0:
            base = (end - 1) // BLOCK * BLOCK
            rows[:, base:end] = table[blocks, : end - base]
            blocks, end = self._previous[blocks], base

    def _gather(self, seqs: Int32, counts: Int32, table: Column, out: Column) -> None:
        """Copy logs of any lengths: the newest block of every log, then the one before it, …"""
        first = np.cumsum(counts) - counts
        blocks, base = self._head[seqs], (counts - 1) // BLOCK * BLOCK
        rows = np.flatnonzero(counts > 0)
        while rows.size:
            index = base[rows, None] + np.arange(BLOCK)
            filled = index < counts[rows, None]
            out[(first[rows, None] + index)[filled]] = table[blocks[rows]][filled]
            blocks[rows] = self._previous[blocks[rows]]
            base[rows] -= BLOCK
            rows = rows[base[rows] >= 0]

    def tail(self, seq: int, count: int) -> Int32:
        """The last `count` tokens of a sequence, or all of them if there are fewer."""
        have = int(self.count[seq])
        count = min(count, have)
        parts: list[Int32] = []
        block, end = int(self._head[seq]), have
        while count > sum(part.size for part in parts):
            start = (end - 1) // BLOCK * BLOCK
            parts.append(self._tokens[block, : end - start])
            block, end = int(self._previous[block]), start
        joined = np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)
        return joined[joined.size - count :]

    def _take_blocks(self, count: int) -> Int32:
        if len(self._free) < count:
            self._grow(count)
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.asarray(taken, dtype=np.int32)

    def _grow(self, count: int) -> None:
        old = self._previous.size
        more = max(old, count)
        self._tokens = np.concatenate([self._tokens, np.zeros((more, BLOCK), np.int32)])
        self._logprobs = np.concatenate([self._logprobs, np.zeros((more, BLOCK), np.float32)])
        self._previous = np.concatenate([self._previous, np.full(more, -1, np.int32)])
        if len(self._kept):
            self._widen()
        self._free.extend(range(old + more - 1, old - 1, -1))

    def check(self) -> None:
        used = int((-(-self.count // BLOCK)).sum())
        assert used + len(self._free) == self._previous.size
        assert ((self._head >= 0) == (self.count > 0)).all()
        for seq, spans in self._spans.items():
            ends = [0, *(end for end, _ in spans), int(self.count[seq])]
            assert sorted(ends) == ends
            assert len(set(ends[:-1])) == len(ends) - 1
