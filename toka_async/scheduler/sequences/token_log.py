"""The tokens that running sequences have generated, in blocks, until they are sent.

A column per lane would be as wide as the longest sequence; chained blocks take what the tokens take. Knows lanes (rows
of the scheduler's tables) and nothing else of a sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Float32, Int32

BLOCK = 64

Column = npt.NDArray[Any]


class TokenLog:
    """Appends one token for many lanes at a time; takes the whole logs of many lanes at a time."""

    def __init__(self, num_lanes: int) -> None:
        self.count = np.zeros(num_lanes, dtype=np.int32)  # tokens in a lane's log
        self._head = np.full(num_lanes, -1, dtype=np.int32)  # its newest block
        self._tokens = np.zeros((num_lanes, BLOCK), dtype=np.int32)
        self._logprobs = np.zeros((num_lanes, BLOCK), dtype=np.float32)
        self._previous = np.full(num_lanes, -1, dtype=np.int32)
        self._free = list(range(num_lanes - 1, -1, -1))

    def resize(self, num_lanes: int) -> None:
        """Room for more lanes."""
        more = num_lanes - self.count.size
        self.count = np.concatenate([self.count, np.zeros(more, np.int32)])
        self._head = np.concatenate([self._head, np.full(more, -1, np.int32)])

    def append(self, lanes: Int32, tokens: Int32, logprobs: Float32 | None) -> None:
        """One token for each of the lanes, which are distinct; `logprobs` None stands for zeros."""
        offsets = self.count[lanes] % BLOCK
        new = lanes[offsets == 0]
        if new.size:
            blocks = self._take_blocks(new.size)
            self._previous[blocks] = self._head[new]
            self._head[new] = blocks
        heads = self._head[lanes]
        self._tokens[heads, offsets] = tokens
        self._logprobs[heads, offsets] = 0.0 if logprobs is None else logprobs
        self.count[lanes] += 1

    def restore(self, lane: int, tokens: Int32, logprobs: Float32) -> None:
        """Fill the empty log of one lane."""
        assert self.count[lane] == 0
        for start in range(0, tokens.size, BLOCK):
            block = int(self._take_blocks(1)[0])
            part = slice(start, start + BLOCK)
            self._tokens[block, : tokens[part].size] = tokens[part]
            self._logprobs[block, : tokens[part].size] = logprobs[part]
            self._previous[block] = self._head[lane]
            self._head[lane] = block
        self.count[lane] = tokens.size

    def take(self, lanes: Int32, scored: bool = True) -> tuple[Int32, Int32, Float32]:
        """The logs of the lanes, which are emptied: counts [lanes], tokens [sum], log-probs [sum], lane after lane.

        Without `scored` there are no log-probs [0].
        """
        counts = self.count[lanes]
        total = int(counts.sum())
        tokens, logprobs = np.empty(total, np.int32), np.empty(total if scored else 0, np.float32)
        same = counts.size > 1 and bool((counts == counts[0]).all())
        gather = self._gather_same if same else self._gather
        gather(lanes, counts, self._tokens, tokens)
        if scored:
            gather(lanes, counts, self._logprobs, logprobs)
        self.drop(lanes)
        return counts, tokens, logprobs

    def drop(self, lanes: Int32) -> None:
        """Empty the logs of the lanes."""
        blocks = self._head[lanes]
        blocks = blocks[blocks >= 0]
        while blocks.size:
            self._free.extend(blocks.tolist())
            blocks = self._previous[blocks]
            blocks = blocks[blocks >= 0]
        self.count[lanes] = 0
        self._head[lanes] = -1

    def _gather_same(self, lanes: Int32, counts: Int32, table: Column, out: Column) -> None:
        """Copy logs of the same length, whole blocks at a time: what many samples that end together have."""
        rows, blocks, end = out.reshape(counts.size, -1), self._head[lanes], int(counts[0])
        while end > 0:
            base = (end - 1) // BLOCK * BLOCK
            rows[:, base:end] = table[blocks, : end - base]
            blocks, end = self._previous[blocks], base

    def _gather(self, lanes: Int32, counts: Int32, table: Column, out: Column) -> None:
        """Copy logs of any lengths: the newest block of every lane, then the one before it, …"""
        first = np.cumsum(counts) - counts
        blocks, base = self._head[lanes], (counts - 1) // BLOCK * BLOCK
        rows = np.flatnonzero(counts > 0)
        while rows.size:
            index = base[rows, None] + np.arange(BLOCK)
            filled = index < counts[rows, None]
            out[(first[rows, None] + index)[filled]] = table[blocks[rows]][filled]
            blocks[rows] = self._previous[blocks[rows]]
            base[rows] -= BLOCK
            rows = rows[base[rows] >= 0]

    def tail(self, lane: int, count: int) -> Int32:
        """The last `count` tokens of a lane, or all of them if there are fewer."""
        have = int(self.count[lane])
        count = min(count, have)
        parts: list[Int32] = []
        block, end = int(self._head[lane]), have
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
