"""Which window pages prompts and sequences hold: those that their next token sees. The others are given back.

A run holds the window of the prompt's next token, and while samples are to start from it, that of its end. Every
sequence holds its own, in a ring. What is behind a window goes back before the next step is built, as the steps that
read it are queued before. Knows pages by their places in a sequence; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toka_async.arrays import Int32
from toka_async.scheduler.cache.window_pool import WindowPool, count_window_span
from toka_async.scheduler.sequences.requests import PromptRun
from toka_async.scheduler.sequences.sequence_table import SequenceTable


class HeldWindows:
    """The window pages in use. Each sequence holds those of places `_firsts` to `_ends`; a page is at place % width.

    A step has passes for one more page of a row than its window has, at most (`most_passes`).
    """

    def __init__(self, pool: WindowPool, table: SequenceTable) -> None:
        self.pool = pool
        self.most_passes = pool.page_size
        self._table = table
        self._width = count_window_span(pool.window, pool.page_size) + 2
        self._firsts = np.zeros(0, np.int32)
        self._ends = np.zeros(0, np.int32)
        self._rings = np.zeros((0, self._width), np.int32)
        self.resize()

    def resize(self) -> None:
        """Make room for all rows of the table."""
        more = self._table.capacity - self._firsts.size
        self._firsts = np.concatenate([self._firsts, np.zeros(more, np.int32)])
        self._ends = np.concatenate([self._ends, np.zeros(more, np.int32)])
        self._rings = np.concatenate([self._rings, np.zeros((more, self._width), np.int32)])

    # ---- prompts

    def can_begin(self, known: Int32, computes: bool) -> bool:
        """Whether a prompt whose leading pages are known can begin behind them, with a token if it `computes`."""
        return self.pool.count_new(self._select_seen(known)) + computes <= self.pool.num_reclaimable

    def begin(self, run: PromptRun) -> None:
        run.window_end = run.num_computed // self.pool.page_size
        run.window_first = self.pool.find_first(run.num_computed)
        self.pool.hold(run.pages[run.window_first : run.window_end])

    def count_room(self, run: PromptRun) -> int:
        """Count the tokens of a prompt for which there are window pages."""
        num_pages = self.pool.count_holdable(self._list_pages(run, run.window_end))
        return (run.window_end + num_pages) * self.pool.page_size - run.num_computed

    def extend(self, run: PromptRun) -> None:
        """Hold the pages of what the run computes in a step."""
        size = self.pool.page_size
        end = -(-run.num_computed // size)
        self.pool.hold(self._list_pages(run, run.window_end, end))
        self.pool.complete(run.pages[max(0, run.window_end - 1) : run.num_computed // size])
        run.window_end = end

    def finish(self, run: PromptRun) -> None:
        """Drop what the token after a computed prompt does not see. A sample's own sequence takes over the rest."""
        self._drop_passed(run)
        if run.task.sample >= 0:
            pages = self._list_pages(run, run.window_first, run.window_end)
            self._set(np.asarray([run.seq], np.int32), run.window_first, pages)
            run.window_first = run.window_end

    def fork(self, run: PromptRun, seqs: Int32) -> None:
        """Let samples that start from a computed prompt hold its full pages."""
        pages = run.pages[run.window_first :]
        self.pool.hold(pages, seqs.size)
        self._set(seqs, run.window_first, pages)

    def leave(self, run: PromptRun) -> None:
        """Drop all that a run holds."""
        self.pool.drop(self._list_pages(run, run.window_first, run.window_end))
        run.window_first = run.window_end

    def _drop_passed(self, run: PromptRun) -> None:
        first = self.pool.find_first(run.num_computed)
        if first > run.window_first:
            self.pool.drop(self._list_pages(run, run.window_first, first))
            run.window_first = first

    def _select_seen(self, known: Int32) -> Int32:
        return known[self.pool.find_first(known.size * self.pool.page_size) :]

    def _list_pages(self, run: PromptRun, first: int, end: int | None = None) -> Int32:
        """List a prompt's pages from a place on, the one that is not full at the end."""
        tail = run.tail_page
        if tail < 0 and run.seq >= 0 and run.task.sample >= 0:  # the sample's sequence has taken it over
            tail = int(self._table.head[run.seq])
        return (run.pages if tail < 0 else np.append(run.pages, np.int32(tail)))[first:end]

    # ---- sequences

    def grow(self, seqs: Int32, pages: Int32) -> None:
        """Let each of the sequences hold a new page behind the others."""
        self.pool.hold(pages)
        self._rings[seqs, self._ends[seqs] % self._width] = pages
        self._ends[seqs] += 1

    def drop_passed(self, rows: Int32, prefilling: Iterable[PromptRun]) -> None:
        """Drop what the next tokens of decoding sequences and of prompts do not see."""
        for run in prefilling:
            self._drop_passed(run)
        seen = self.pool.find_firsts(self._table.position[rows])
        late = seen > self._firsts[rows]
        while late.any():
            rows, seen = rows[late], seen[late]
            self.pool.drop(self._rings[rows, self._firsts[rows] % self._width])
            self._firsts[rows] += 1
            late = seen > self._firsts[rows]

    def release(self, seqs: Int32) -> None:
        """Drop all that the sequences hold."""
        self.pool.drop(self._list_held(seqs))
        self._firsts[seqs] = self._ends[seqs] = 0

    def _set(self, seqs: Int32, first: int, pages: Int32) -> None:
        self._firsts[seqs] = first
        self._ends[seqs] = first + pages.size
        self._rings[seqs[:, None], (first + np.arange(pages.size)) % self._width] = pages

    def _list_held(self, seqs: Int32) -> Int32:
        places = self._firsts[seqs, None] + np.arange(self._width)
        held = places < self._ends[seqs, None]
        pages: Int32 = self._rings[seqs[:, None], places % self._width][held]
        return pages

    def check(self, runs: Iterable[PromptRun], seqs: Int32) -> None:
        """Assert that everything in use is held by these, and that each holds what its next token sees."""
        held = [self._list_pages(run, run.window_first, run.window_end) for run in runs]
        self.pool.check(np.concatenate([np.empty(0, np.int32), *held, self._list_held(seqs)]))
        assert (self._ends - self._firsts <= self._width).all()
        for run in runs:
            first = self.pool.find_first(run.num_computed)
            assert run.computed or run.window_first <= first
            assert not (run.computed and run.num_pending) or run.window_first == first
