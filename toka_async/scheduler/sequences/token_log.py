"""The tokens that running sequences have generated, in blocks, until they are sent.

A column per sequence would be as wide as the longest one; chained blocks take only what the tokens need. Knows
sequences by their rows and nothing else of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Float32, Int32

BLOCK = 64

Column = npt.NDArray[Any]


class TokenLog:
    """Appends one token to many logs at a time; takes many whole logs at a time."""

    def __init__(self, num_seqs: int) -> None:
        self.count = np.zeros(num_seqs, dtype=np.int32)  # tokens in a sequence's log
        self._head = np.full(num_seqs, -1, dtype=np.int32)  # its newest block
        self._tokens = np.zeros((num_seqs, BLOCK), dtype=np.int32)
        self._logprobs = np.zeros((num_seqs, BLOCK), dtype=np.float32)
        self._previous = np.full(num_seqs, -1, dtype=np.int32)
        self._free = list(range(num_seqs - 1, -1, -1))

    def resize(self, num_seqs: int) -> None:
        more = num_seqs - self.count.size
        self.count = np.concatenate([self.count, np.zeros(more, np.int32)])
        self._head = np.concatenate([self._head, np.full(more, -1, np.int32)])

    def append(self, seqs: Int32, tokens: Int32, logprobs: Float32 | None) -> None:
        """Append a token to each of the sequences, which are distinct; `logprobs` None stands for zeros."""
        offsets = self.count[seqs] % BLOCK
        new = seqs[offsets == 0]
        if new.size:
            blocks = self._take_blocks(new.size)
            self._previous[blocks] = self._head[new]
            self._head[new] = blocks
        heads = self._head[seqs]
        self._tokens[heads, offsets] = tokens
        self._logprobs[heads, offsets] = 0.0 if logprobs is None else logprobs
        self.count[seqs] += 1

    def restore(self, seq: int, tokens: Int32, logprobs: Float32) -> None:
        assert self.count[seq] == 0
        for start in range(0, tokens.size, BLOCK):
            block = int(self._take_blocks(1)[0])
            part = slice(start, start + BLOCK)
            self._tokens[block, : tokens[part].size] = tokens[part]
            self._logprobs[block, : tokens[part].size] = logprobs[part]
            self._previous[block] = self._head[seq]
            self._head[seq] = block
        self.count[seq] = tokens.size

    def take(self, seqs: Int32, scored: bool = True) -> tuple[Int32, Int32, Float32]:
        """Empty logs; returns counts [seqs], tokens and log-probs [sum] in order; log-probs [0] without `scored`."""
        counts = self.count[seqs]
        total = int(counts.sum())
        tokens, logprobs = np.empty(total, np.int32), np.empty(total if scored else 0, np.float32)
        same = counts.size > 1 and bool((counts == counts[0]).all())
        gather = self._gather_same if same else self._gather
        gather(seqs, counts, self._tokens, tokens)
        if scored:
            gather(seqs, counts, self._logprobs, logprobs)
        self.drop(seqs)
        return counts, tokens, logprobs

    def drop(self, seqs: Int32) -> None:
        blocks = self._head[seqs]
        blocks = blocks[blocks >= 0]
        while blocks.size:
            self._free.extend(blocks.tolist())
            blocks = self._previous[blocks]
            blocks = blocks[blocks >= 0]
        self.count[seqs] = 0
        self._head[seqs] = -1

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
        self._free.extend(range(old + more - 1, old - 1, -1))

    def check(self) -> None:
        used = int((-(-self.count // BLOCK)).sum())
        assert used + len(self._free) == self._previous.size
        assert ((self._head >= 0) == (self.count > 0)).all()
