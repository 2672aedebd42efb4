"""The running set: lanes, their slots and pages, and the prompts they stand on.

Opens and closes prompt runs, starts and releases lanes, and notes what the ranks must be told about it. Decides
nothing: who runs is the builder's choice.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from toka_async.arrays import Float64, Int32, places
from toka_async.messages import Ready
from toka_async.scheduler.cache.prefix_cache import PageCache
from toka_async.scheduler.sequences.requests import Generated, PrefillTask, PromptRun, Top
from toka_async.scheduler.sequences.sequence_table import SequenceTable, index
from toka_async.scheduler.sequences.token_log import TokenLog

GOLDEN_RATIO = 0.6180339887498949


class RunningSet:
    """Everything that holds a slot or a page.

    rows: decoding lanes in the ranks' row order. prefilling: runs whose prompt is not all built into steps, in order.
    forking: runs that are computed and have samples to start, in order. tops: lane -> likeliest tokens, one entry
    a token, of lanes that want them.
    """

    def __init__(self, ready: Ready, prefix: bool) -> None:
        self.lanes = SequenceTable(2 * ready.max_seqs)
        self.log = TokenLog(self.lanes.capacity)
        self.tops: dict[int, list[Top]] = {}
        self.cache = PageCache(ready.num_pages, ready.page_size, prefix)
        self.rows = np.empty(0, np.int32)
        self.prefilling: dict[PromptRun, None] = {}
        self._sharing: dict[PromptRun, None] = {}  # of them, those for several samples
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

    # ---- prompt runs

    def open(self, job: PrefillTask, fits: Callable[[PrefillTask, int], bool]) -> PromptRun | None:
        """Put a job's prompt on the ranks with all of its pages, or None if they are not to be had.

        `fits` is asked about the job and the number of pages that it takes from those that are free or that nobody
        owns: new ones, and cached ones found for this prompt.
        """
        cache, tokens = self.cache, job.token_ids
        cached_before = cache.tree.num_cached
        wants_scores = job.request.scores is not None
        nodes = [] if wants_scores else cache.lookup(tokens, job.request.submit.salt)
        num_revived = cached_before - cache.tree.num_cached
        to_compute = tokens.size - (job.sample < 0)
        num_full, num_tail = to_compute // cache.page_size, int(to_compute % cache.page_size > 0)
        needed = num_full - len(nodes) + num_tail
        if needed > cache.num_reclaimable or not fits(job, needed + num_revived):
            cache.release(nodes)
            return None
        new = cache.take(needed)
        pages = new[: num_full - len(nodes)]
        if nodes:
            pages = np.concatenate([np.asarray([node.page for node in nodes], dtype=np.int32), pages])
        run = PromptRun(
            key=self._take_key(),
            job=job,
            num_to_compute=to_compute,
            num_found=len(nodes) * cache.page_size,
            num_computed=len(nodes) * cache.page_size,
            nodes=nodes,
            pages=pages,
            tail_page=int(new[-1]) if num_tail else -1,
        )
        self.runs[run.key] = run
        if run.forks:
            job.request.shared_run = run
        return run

    def _take_key(self) -> int:
        """Keys are small numbers, so that they index arrays."""
        if self._free_keys:
            return self._free_keys.pop()
        self._next_key += 1
        return self._next_key - 1

    def take_dropped(self) -> list[int]:
        """Keys of runs closed since the last call; they may be given to runs that the same step tells of."""
        dropped, self.dropped = self.dropped, []
        self._free_keys.extend(dropped)
        return dropped

    def start_computing(self, runs: Sequence[PromptRun]) -> tuple[Int32, Int32]:
        """Give each run the lane that computes its prompt. A sample's own lane takes over the tail page.

        Returns:
            The lanes, and for each the page that is not full, or -1.
        """
        samples = np.asarray([run.job.sample for run in runs], np.int32)
        tails = np.asarray([run.tail_page for run in runs], np.int32)
        lanes = self._start(runs, samples, np.asarray([run.num_computed for run in runs], np.int32))
        for run, lane in zip(runs, lanes.tolist(), strict=True):
            run.lane = lane
            self.prefilling[run] = None
            if run.job.sample < 0:
                self._sharing[run] = None
            else:
                run.tail_page = -1
            if run.job.generated is not None:
                self._restore(lane, run.job.generated)
        own = (samples >= 0) & (tails >= 0)
        self.lanes.head[lanes[own]] = tails[own]
        self.cache.chains.append(np.full(int(own.sum()), -1, np.int32), tails[own])
        return lanes, tails

    def _restore(self, lane: int, generated: Generated) -> None:
        """The lane goes on with a preempted sample's tokens."""
        self.lanes.remaining[lane] -= generated.tokens.size
        self.log.restore(lane, generated.tokens, generated.logprobs)
        if generated.tops:
            self.tops[lane] = list(generated.tops)

    def pending_runs(self) -> list[PromptRun]:
        """Prompts that are being computed and have samples to start."""
        return [run for run in self._sharing if run.num_pending] if self._sharing else []

    def advance(self, run: PromptRun, count: int) -> None:
        """`count` more prompt tokens are built into a step: full pages enter the prefix tree at once.

        Where the tree has the page's tokens already, this page and those after it stay the run's own: to own the
        twin too would take two pages for one.
        """
        run.num_computed += count
        assert run.num_computed <= run.num_to_compute
        if run.lane >= 0:  # else it starts there
            self.lanes.position[run.lane] += count
        if not self.cache.prefix:
            return
        size = self.cache.page_size
        for i in range(len(run.nodes), min(run.num_computed // size, run.pages.size)):
            parent = run.nodes[-1] if run.nodes else None
            tokens = run.job.token_ids[i * size : (i + 1) * size]
            node = self.cache.tree.insert(parent, tokens, int(run.pages[i]), run.request.submit.salt)
            if node is None:
                return
            run.nodes.append(node)

    def finish_computing(self, run: PromptRun) -> None:
        """The whole prompt is built into steps: the lane goes on as its sample's, or is done."""
        self._computes_no_more(run)
        lane, run.lane = run.lane, -1
        if run.job.sample < 0:
            self.lanes.alive[lane] = False
            if run.num_pending:
                self.add_forking(run)
            lanes = np.asarray([lane], np.int32)
            self.release(lanes)
            self.retire(lanes)

    def _computes_no_more(self, run: PromptRun) -> None:
        del self.prefilling[run]
        self._sharing.pop(run, None)

    def add_forking(self, run: PromptRun) -> None:
        """Samples of a computed run can start."""
        insort(self.forking, run, key=lambda r: r.job.order)

    def fork(self, run: PromptRun, count: int) -> tuple[Int32, Int32]:
        """Start `count` pending samples; returns their lanes and the pages onto which the tail page is to be copied.

        When none are pending any more, the run's own tail page goes back: the copies precede its next use.
        """
        request = run.request
        samples = np.arange(request.next_sample, request.next_sample + count, dtype=np.int32)
        lanes = self._start([run], samples, run.request.prompt.size - 1)
        request.next_sample += count
        copies = np.empty(0, np.int32)
        if run.tail_page >= 0:
            copies = self.cache.take(count)
            self.cache.chains.append(self.lanes.head[lanes], copies)
            self.lanes.head[lanes] = copies
        if not run.num_pending:
            self.forking.remove(run)
            if run.tail_page >= 0:
                self.cache.give(np.asarray([run.tail_page], np.int32))
                run.tail_page = -1
        return lanes, copies

    def close(self, run: PromptRun) -> None:
        """Give back the pages of a run that no lane holds, and forget it."""
        assert run.num_lanes == 0
        assert not run.closed
        run.closed = True
        if not run.computed:
            self._computes_no_more(run)
        elif run.forks and run in self.forking:
            self.forking.remove(run)
        if run.request.shared_run is run:
            run.request.shared_run = None
        self.cache.give(run.own_pages())
        if run.nodes:
            self.cache.release(run.nodes)
        del self.runs[run.key]
        self.dropped.append(run.key)

    # ---- lanes

    def take_tops(self, lanes: Int32) -> dict[int, list[Top]]:
        """The likeliest tokens kept for those of the lanes that want them."""
        if not self.tops:
            return {}
        return {lane: self.tops.pop(lane) for lane in lanes.tolist() if lane in self.tops}

    def _start(self, runs: Sequence[PromptRun], samples: Int32, position: Int32 | int) -> Int32:
        """A lane for each of the samples, which are of one run, or of one each."""
        tables, count = self.lanes, samples.size
        lanes = tables.take(count)
        if self.log.count.size < tables.capacity:
            self.log.resize(tables.capacity)
        where = index(lanes)
        tables.slot[where] = self._slots[self._slots.size - count :]
        self._slots = self._slots[: self._slots.size - count]
        tables.position[where] = position
        tables.sample[where] = samples
        tables.length_rank[where] = self._ranks(count)
        tables.expected[where] = 0
        tables.describe(where, [run.request.columns() for run in runs])
        tables.remaining[where] = tables.max_tokens[where]
        tables.prompt_key[where] = [run.key for run in runs]
        tables.num_shared[where] = [run.pages.size for run in runs]
        for end_ids, rows in places(bytes(run.request.submit.sampling.end_ids) for run in runs).items():
            tables.set_ends(lanes if len(runs) == 1 else lanes[rows], np.frombuffer(end_ids, np.int32))
        for run in runs:
            run.num_lanes += count if len(runs) == 1 else 1
        return lanes

    def _ranks(self, count: int) -> Float64:
        """Places in (0, 1), spread evenly however many are drawn: multiples of the golden ratio."""
        first, self._num_started = self._num_started, self._num_started + count
        ranks: Float64 = np.clip((np.arange(first, first + count) * GOLDEN_RATIO + 0.5) % 1.0, 1e-6, 1.0 - 1e-6)
        return ranks

    def grow(self, lanes: Int32) -> Int32:
        """One more page for each of the lanes; returns the pages."""
        pages = self.cache.take(lanes.size)
        self.cache.chains.append(self.lanes.head[lanes], pages)
        self.lanes.head[lanes] = pages
        return pages

    def release(self, lanes: Int32) -> None:
        """Give back slots and pages of those lanes that still hold theirs; the next step may use them again."""
        tables = self.lanes
        lanes = lanes[tables.holds[lanes]]
        if not lanes.size:
            return
        slots = tables.slot[lanes]
        self.freed.append(slots)
        self._slots = np.concatenate([self._slots, slots])
        self.cache.give(self.cache.chains.collect(tables.head[lanes]))
        tables.head[lanes] = -1
        tables.holds[lanes] = False
        for key, count in Counter(tables.prompt_key[lanes].tolist()).items():
            run = self.runs[key]
            run.num_lanes -= count
            if run.num_lanes == 0 and run.num_pending == 0:
                self.close(run)

    def retire(self, lanes: Int32, completed: int = -1) -> None:
        """The lanes are dead and hold nothing: free once no queued step computes them."""
        self.lanes.retire(lanes, completed)

    def check(self) -> None:
        """Pages and slots are each in exactly one place; counts agree."""
        tables = self.lanes
        tables.check()
        self.log.check()
        held = np.flatnonzero(tables.holds).astype(np.int32)
        slots = np.concatenate([self._slots, tables.slot[held]])
        assert slots.size == np.unique(slots).size == self.max_seqs
        owned = [run.own_pages() for run in self.runs.values()]
        owned.append(self.cache.chains.collect(tables.head[held]))
        self.cache.check(owned)
        for run in self.runs.values():
            assert run.num_lanes == int((tables.prompt_key[held] == run.key).sum())
            assert run.num_lanes or run.num_pending
            assert not run.closed
        assert all(run.computed and run.num_pending for run in self.forking)
        assert all(not run.computed and run.lane >= 0 for run in self.prefilling)
