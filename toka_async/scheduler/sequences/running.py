"""The running set: sequences, their slots and pages, and the prompts that they share.

Opens and closes prompt runs, starts and releases sequences, and notes what the ranks must be told. Decides nothing: the
builder chooses what runs.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from toka_async.arrays import Float64, Int32, group_places
from toka_async.messages import Ready
from toka_async.scheduler.cache.prefix_cache import PageCache
from toka_async.scheduler.cache.window_pool import WindowPool
from toka_async.scheduler.sequences.held_windows import HeldWindows
from toka_async.scheduler.sequences.requests import Generated, PrefillTask, PromptRun, Top
from toka_async.scheduler.sequences.sequence_table import SequenceTable, index
from toka_async.scheduler.sequences.step_draft import StateSave
from toka_async.scheduler.sequences.token_log import TokenLog

GOLDEN_RATIO = 0.6180339887498949


class RunningSet:
    """Everything that holds a slot or a page.

    rows: decoding sequences in the ranks' row order. prefilling: runs whose prompt is not all built into steps, in
    order. forking: computed runs with samples to start, in order. tops: sequence -> likeliest tokens, one entry for
    each token, for sequences that want them. windows: None: all layers see all tokens.
    """

    def __init__(self, ready: Ready, prefix: bool) -> None:
        self.table = SequenceTable(2 * ready.max_seqs)
        self.log = TokenLog(self.table.capacity)
        self.tops: dict[int, list[Top]] = {}
        windows = None
        if ready.num_window_pages:
            windows = WindowPool(ready.num_pages, ready.page_size, ready.num_window_pages, ready.window)
        self.windows = None if windows is None else HeldWindows(windows, self.table)
        self.cache = PageCache(ready.num_pages, ready.page_size, prefix, ready.num_snapshots, windows)
        self.rows = np.empty(0, np.int32)
        self.prefilling: dict[PromptRun, None] = {}
        self._sharing: dict[PromptRun, None] = {}  # runs of `prefilling` for several samples
        self.forking: list[PromptRun] = []
        self.runs: dict[int, PromptRun] = {}
        self.freed: list[Int32] = []
        self.dropped: list[int] = []
        self.max_seqs = ready.max_seqs
        self._slots = np.arange(ready.max_seqs - 1, -1, -1, dtype=np.int32)
        self._free_keys: list[int] = []
        self._next_key = 0
        self._num_started = 0

    @property
    def num_free_slots(self) -> int:
        return self._slots.size

    @property
    def num_running(self) -> int:
        """Sequences and prompts that hold a slot."""
        return self.max_seqs - self._slots.size

    @property
    def num_growable(self) -> int:
        """By how many pages sequences can grow."""
        num_pages = self.cache.num_reclaimable
        return num_pages if self.windows is None else min(num_pages, self.windows.pool.num_reclaimable)

    # ---- prompt runs

    def open(self, task: PrefillTask, fits: Callable[[PrefillTask, int], bool]) -> PromptRun | None:
        """Put a task's prompt on the ranks with all of its pages, or return None if they are not available.

        `fits` gets the task and the number of pages that it takes from free and unowned ones: new pages, and cached
        pages found for this prompt.
        """
        cache, tokens = self.cache, task.token_ids
        cached_before = cache.tree.num_cached
        wants_scores = task.request.scores is not None
        nodes = [] if wants_scores else cache.lookup(tokens, task.request.submit.salt)
        num_revived = cached_before - cache.tree.num_cached
        to_compute = tokens.size - (task.sample < 0)
        num_full, num_tail = to_compute // cache.page_size, int(to_compute % cache.page_size > 0)
        needed = num_full - len(nodes) + num_tail
        # Samples start from a state that the run holds, unless they start at the prompt's first token.
        holds_state = cache.snapshots.num_snapshots > 0 and to_compute > 0 and task.forks
        has_states = not holds_state or cache.snapshots.num_reclaimable > 0
        num_known, snapshot = cache.find_start(nodes)
        known = np.asarray([node.page for node in nodes[:num_known]], dtype=np.int32)
        computes = to_compute > known.size * cache.page_size
        has_windows = self.windows is None or self.windows.can_begin(known, computes)
        is_possible = needed <= cache.num_reclaimable and has_states and has_windows
        if not is_possible or not fits(task, needed + num_revived):
            cache.release(nodes)
            return None
        new = cache.take(needed)
        pages = new[: num_full - len(nodes)]
        if nodes:
            pages = np.concatenate([np.asarray([node.page for node in nodes], dtype=np.int32), pages])
        run = PromptRun(
            key=self._take_key(),
            task=task,
            num_to_compute=to_compute,
            num_found=num_known * cache.page_size,
            num_computed=num_known * cache.page_size,
            epoch=cache.epoch,
            nodes=nodes,
            pages=pages,
            tail_page=int(new[-1]) if num_tail else -1,
            begins_with=snapshot,
            saves=self._choose_saves(tokens.size, num_known, len(nodes)),
        )
        if self.windows is not None:
            self.windows.begin(run)
        if holds_state:
            run.snapshot = cache.snapshots.detach(nodes[-1]) if run.computed else cache.snapshots.take()
        self.runs[run.key] = run
        if run.forks:
            task.request.shared_run = run
        return run

    def _choose_saves(self, num_tokens: int, num_known: int, num_matched: int) -> tuple[int, ...]:
        """Choose where a prompt's state is kept: at its last full page, and where it leaves what the tree knows."""
        cache = self.cache
        if not cache.prefix or not cache.snapshots.num_snapshots:
            return ()
        last = (num_tokens - 1) // cache.page_size
        return tuple(page * cache.page_size for page in sorted({num_matched, last}) if page > num_known)

    def list_saves(self, run: PromptRun, count: int) -> list[StateSave]:
        """List the states to keep of the run's newest chunk, of `count` tokens. Snapshots of nodes are taken for it."""
        cache, end = self.cache, run.num_computed
        holds_last = run.snapshot >= 0 and run.computed
        saves = [StateSave(run.seq, count, run.snapshot, None)] if holds_last else []
        for position in run.saves if run.epoch == cache.epoch else ():
            page = position // cache.page_size
            if not end - count < position <= end - holds_last or len(run.nodes) < page:
                continue
            node = run.nodes[page - 1]
            snapshot = -1 if node in cache.snapshots else cache.snapshots.take()
            if snapshot >= 0:
                saves.append(StateSave(run.seq, position - end + count, snapshot, node))
        return saves

    def _take_key(self) -> int:
        """Keys are small numbers, so that they index arrays."""
        if self._free_keys:
            return self._free_keys.pop()
        self._next_key += 1
        return self._next_key - 1

    def take_dropped(self) -> list[int]:
        """Take the keys of runs closed since the last call; runs of the same step may get them."""
        dropped, self.dropped = self.dropped, []
        self._free_keys.extend(dropped)
        return dropped

    def start_computing(self, runs: Sequence[PromptRun]) -> tuple[Int32, Int32]:
        """Give each run the sequence that computes its prompt. A sample's own sequence takes over the tail page.

        Returns:
            The sequences, and for each the page that is not full, or -1.
        """
        samples = np.asarray([run.task.sample for run in runs], np.int32)
        tails = np.asarray([run.tail_page for run in runs], np.int32)
        seqs = self._start(runs, samples, np.asarray([run.num_computed for run in runs], np.int32))
        for run, seq in zip(runs, seqs.tolist(), strict=True):
            run.seq = seq
            self.prefilling[run] = None
            if run.task.sample < 0:
                self._sharing[run] = None
            else:
                run.tail_page = -1
            if run.task.generated is not None:
                self._restore(seq, run.task.generated)
        own = (samples >= 0) & (tails >= 0)
        self.table.head[seqs[own]] = tails[own]
        self.cache.chains.append(np.full(int(own.sum()), -1, np.int32), tails[own])
        return seqs, tails

    def _restore(self, seq: int, generated: Generated) -> None:
        self.table.remaining[seq] -= generated.tokens.size
        self.log.restore(seq, generated.columns)
        if generated.tops:
            self.tops[seq] = list(generated.tops)

    def pending_runs(self) -> list[PromptRun]:
        """Prompts that are being computed and have samples to start."""
        return [run for run in self._sharing if run.num_pending] if self._sharing else []

    def advance(self, run: PromptRun, count: int) -> None:
        """Note that `count` more prompt tokens are built into a step; full pages enter the prefix tree at once.

        Where the tree already has a page with these tokens, this page and later ones stay the run's own: owning the
        twin too would take two pages for one.
        """
        run.num_computed += count
        assert run.num_computed <= run.num_to_compute
        if run.seq >= 0:  # otherwise it starts at this position
            self.table.position[run.seq] += count
        if self.windows is not None:
            self.windows.extend(run)
        if not self.cache.prefix:
            return
        size = self.cache.page_size
        for i in range(len(run.nodes), min(run.num_computed // size, run.pages.size)):
            parent = run.nodes[-1] if run.nodes else None
            tokens = run.task.token_ids[i * size : (i + 1) * size]
            node = self.cache.insert(parent, tokens, int(run.pages[i]), run.request.submit.salt, run.epoch)
            if node is None:
                return
            run.nodes.append(node)

    def finish_computing(self, run: PromptRun) -> None:
        """The whole prompt is built into steps: its sequence continues as the sample, or ends."""
        self._stop_computing(run)
        if self.windows is not None:
            self.windows.finish(run)
        seq, run.seq = run.seq, -1
        if run.task.sample < 0:
            self.table.alive[seq] = False
            if run.num_pending:
                self.add_forking(run)
            seqs = np.asarray([seq], np.int32)
            self.release(seqs)
            self.retire(seqs)

    def _stop_computing(self, run: PromptRun) -> None:
        del self.prefilling[run]
        self._sharing.pop(run, None)

    def add_forking(self, run: PromptRun) -> None:
        insort(self.forking, run, key=lambda r: r.task.order)

    def fork(self, run: PromptRun, count: int) -> tuple[Int32, Int32]:
        """Start `count` pending samples; returns their sequences and the pages onto which the tail page is to be
        copied.

        When the last one starts, the run's own tail page goes back: the copies precede its next use.
        """
        request = run.request
        samples = np.arange(request.next_sample, request.next_sample + count, dtype=np.int32)
        seqs = self._start([run], samples, run.request.prompt.size - 1)
        request.next_sample += count
        if self.windows is not None:
            self.windows.fork(run, seqs)
        copies = self.grow(seqs) if run.tail_page >= 0 else np.empty(0, np.int32)
        if not run.num_pending:
            self.stop_forking(run)
        return seqs, copies

    def stop_forking(self, run: PromptRun) -> None:
        """No more samples start from the run: give back what only they would need."""
        run.stopped = True
        self.forking.remove(run)
        self._leave_snapshot(run)
        if self.windows is not None:
            self.windows.leave(run)
        if run.tail_page >= 0:
            self.cache.give(np.asarray([run.tail_page], np.int32))
            run.tail_page = -1
        if run.request.shared_run is run:
            run.request.shared_run = None

    def _leave_snapshot(self, run: PromptRun) -> None:
        """Leave the state that a run holds to the end of its last page if that is where it belongs."""
        if run.snapshot < 0:
            return
        size, num_nodes = self.cache.page_size, len(run.nodes)
        if run.computed and run.num_to_compute == num_nodes * size and run.epoch == self.cache.epoch:
            self.cache.snapshots.attach(run.nodes[-1], run.snapshot)
        else:
            self.cache.snapshots.give(run.snapshot)
        run.snapshot = -1

    def close(self, run: PromptRun) -> None:
        """Give back the pages of a run that no sequence holds, and forget it."""
        assert run.num_seqs == 0
        assert not run.closed
        run.closed = True
        if not run.computed:
            self._stop_computing(run)
        elif run.forks and run in self.forking:
            self.forking.remove(run)
        if run.request.shared_run is run:
            run.request.shared_run = None
        self._leave_snapshot(run)
        if self.windows is not None:
            self.windows.leave(run)
        self.cache.give(run.own_pages())
        if run.nodes:
            self.cache.release(run.nodes)
        del self.runs[run.key]
        self.dropped.append(run.key)

    # ---- sequences

    def take_tops(self, seqs: Int32) -> dict[int, list[Top]]:
        if not self.tops:
            return {}
        return {seq: self.tops.pop(seq) for seq in seqs.tolist() if seq in self.tops}

    def _start(self, runs: Sequence[PromptRun], samples: Int32, position: Int32 | int) -> Int32:
        """Take a sequence for each of the samples, which belong to one run, or to one run each."""
        table, count = self.table, samples.size
        seqs = table.take(count)
        if self.log.count.size < table.capacity:
            self.log.resize(table.capacity)
            if self.windows is not None:
                self.windows.resize()
        where = index(seqs)
        table.slot[where] = self._slots[self._slots.size - count :]
        self._slots = self._slots[: self._slots.size - count]
        table.position[where] = position
        table.sample[where] = samples
        table.length_rank[where] = self._draw_ranks(count)
        table.expected[where] = 0
        table.describe(where, [run.request.columns() for run in runs])
        table.remaining[where] = table.max_tokens[where]
        table.prompt_key[where] = [run.key for run in runs]
        table.num_shared[where] = [run.pages.size for run in runs]
        for end_ids, rows in group_places(bytes(run.request.submit.sampling.end_ids) for run in runs).items():
            table.set_ends(seqs if len(runs) == 1 else seqs[rows], np.frombuffer(end_ids, np.int32))
        for run in runs:
            run.num_seqs += count if len(runs) == 1 else 1
        return seqs

    def _draw_ranks(self, count: int) -> Float64:
        """Draw ranks in (0, 1), spread evenly for any count: multiples of the golden ratio."""
        first, self._num_started = self._num_started, self._num_started + count
        ranks: Float64 = np.clip((np.arange(first, first + count) * GOLDEN_RATIO + 0.5) % 1.0, 1e-6, 1.0 - 1e-6)
        return ranks

    def grow(self, seqs: Int32) -> Int32:
        """Add a page to each of the sequences; returns the pages."""
        pages = self.cache.take(seqs.size)
        self.cache.chains.append(self.table.head[seqs], pages)
        self.table.head[seqs] = pages
        if self.windows is not None:
            self.windows.grow(seqs, pages)
        return pages

    def release(self, seqs: Int32) -> None:
        """Give back slots and pages of those sequences that still hold theirs; the next step may use them."""
        table = self.table
        seqs = seqs[table.holds[seqs]]
        if not seqs.size:
            return
        slots = table.slot[seqs]
        self.freed.append(slots)
        self._slots = np.concatenate([self._slots, slots])
        counts = Counter(table.prompt_key[seqs].tolist())
        if self.windows is not None:
            self.windows.release(seqs)
            for run in (self.runs[key] for key in counts):
                if run.task.sample >= 0:  # it may compute its prompt
                    self.windows.leave(run)
        self.cache.give(self.cache.chains.collect(table.head[seqs]))
        table.head[seqs] = -1
        table.holds[seqs] = False
        for key, count in counts.items():
            run = self.runs[key]
            run.num_seqs -= count
            if run.num_seqs == 0 and run.num_pending == 0:
                self.close(run)

    def retire(self, seqs: Int32, completed: int = -1) -> None:
        """Free the rows of dead sequences that hold nothing, once no queued step computes them."""
        self.table.retire(seqs, completed)

    def check(self) -> None:
        """Assert that pages and slots are each in exactly one place, and that counts agree."""
        table = self.table
        table.check()
        self.log.check()
        held = np.flatnonzero(table.holds).astype(np.int32)
        slots = np.concatenate([self._slots, table.slot[held]])
        assert slots.size == np.unique(slots).size == self.max_seqs
        owned = [run.own_pages() for run in self.runs.values()]
        owned.append(self.cache.chains.collect(table.head[held]))
        self.cache.check(owned)
        if self.windows is not None:
            self.windows.check(self.runs.values(), held)
        self.cache.snapshots.check([run.snapshot for run in self.runs.values() if run.snapshot >= 0])
        for run in self.runs.values():
            assert run.num_seqs == int((table.prompt_key[held] == run.key).sum())
            assert run.num_seqs or run.num_pending
            assert not run.closed
        assert all(run.computed and run.num_pending for run in self.forking)
        assert all(not run.computed and run.seq >= 0 for run in self.prefilling)
