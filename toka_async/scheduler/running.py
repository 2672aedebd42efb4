"""The running set: lanes, their slots and pages, and the prompts they stand on.

Opens and closes prompt runs, starts and releases lanes, and notes what the ranks must be told about it. Decides
nothing: who runs is the builder's choice.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable

import numpy as np

from toka_async.arrays import Float64, Int32, as_i32
from toka_async.messages import Ready
from toka_async.scheduler.cache import PageCache
from toka_async.scheduler.lanes import Lanes, index
from toka_async.scheduler.requests import Job, PromptRun, Top
from toka_async.scheduler.token_log import TokenLog

GOLDEN_RATIO = 0.6180339887498949


class RunningSet:
    """Everything that holds a slot or a page.

    rows: decoding lanes in the ranks' row order. prefilling: runs whose prompt is not all built into steps, in order.
    forking: runs that are computed and have samples to start, in order. tops: lane -> likeliest tokens, one entry
    a token, of lanes that want them.
    """

    def __init__(self, ready: Ready, prefix: bool) -> None:
        self.lanes = Lanes(2 * ready.max_seqs)
        self.log = TokenLog(self.lanes.capacity)
        self.tops: dict[int, list[Top]] = {}
        self.cache = PageCache(ready.num_pages, ready.page_size, prefix)
        self.rows = np.empty(0, np.int32)
        self.prefilling: list[PromptRun] = []
        self.forking: list[PromptRun] = []
        self.runs: dict[int, PromptRun] = {}
        self.freed: list[Int32] = []
        self.dropped: list[int] = []
        self._max_seqs = ready.max_seqs
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
        return self._max_seqs - self._slots.size

    # ---- prompt runs

    def open(self, job: Job, fits: Callable[[Job, int], bool]) -> PromptRun | None:
        """Put a job's prompt on the ranks with all of its pages, or None if they are not to be had.

        `fits` is asked about the job and the number of pages that it takes from those that are free or that nobody
        owns: new ones, and cached ones found for this prompt.
        """
        cache, tokens = self.cache, job.token_ids
        cached_before = cache.tree.num_cached
        wants_scores = job.request.scores is not None
        nodes = [] if wants_scores else cache.lookup(tokens)
        num_revived = cached_before - cache.tree.num_cached
        to_compute = tokens.size - (job.sample < 0)
        num_full, num_tail = to_compute // cache.page_size, int(to_compute % cache.page_size > 0)
        needed = num_full - len(nodes) + num_tail
        if needed > cache.num_reclaimable or not fits(job, needed + num_revived):
            cache.release(nodes)
            return None
        new = cache.take(needed)
        found = np.asarray([node.page for node in nodes], dtype=np.int32)
        run = PromptRun(
            key=self._take_key(),
            job=job,
            num_to_compute=to_compute,
            num_found=len(nodes) * cache.page_size,
            num_computed=len(nodes) * cache.page_size,
            nodes=nodes,
            pages=np.concatenate([found, new[: num_full - len(nodes)]]),
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

    def start_computing(self, run: PromptRun) -> int:
        """Give a run the lane that computes its prompt. A sample's own lane takes over the tail page."""
        job = run.job
        lane = self._start(run, np.asarray([job.sample], np.int32), run.num_computed)
        index = int(lane[0])
        run.lane = index
        if job.sample >= 0:
            self.lanes.head[index] = run.tail_page
            if run.tail_page >= 0:
                self.cache.chains.append(np.asarray([-1], np.int32), np.asarray([run.tail_page], np.int32))
            run.tail_page = -1
        if job.generated is not None:
            self.lanes.remaining[index] -= job.generated.tokens.size
            self.log.restore(index, job.generated.tokens, job.generated.logprobs)
            if job.generated.tops:
                self.tops[index] = list(job.generated.tops)
        self.prefilling.append(run)
        return index

    def advance(self, run: PromptRun, count: int) -> None:
        """`count` more prompt tokens are built into a step: full pages enter the prefix tree at once.

        Where the tree has the page's tokens already, this page and those after it stay the run's own: to own the
        twin too would take two pages for one.
        """
        run.num_computed += count
        assert run.num_computed <= run.num_to_compute
        self.lanes.position[run.lane] += count
        if not self.cache.prefix:
            return
        size = self.cache.page_size
        for i in range(len(run.nodes), min(run.num_computed // size, run.pages.size)):
            parent = run.nodes[-1] if run.nodes else None
            node = self.cache.tree.insert(parent, run.job.token_ids[i * size : (i + 1) * size], int(run.pages[i]))
            if node is None:
                return
            run.nodes.append(node)

    def finish_computing(self, run: PromptRun) -> None:
        """The whole prompt is built into steps: the lane goes on as its sample's, or is done."""
        self.prefilling.remove(run)
        lane, run.lane = run.lane, -1
        if run.job.sample < 0:
            self.lanes.alive[lane] = False
            if run.num_pending:
                self.add_forking(run)
            lanes = np.asarray([lane], np.int32)
            self.release(lanes)
            self.retire(lanes)

    def add_forking(self, run: PromptRun) -> None:
        """Samples of a computed run can start."""
        insort(self.forking, run, key=lambda r: r.job.order)

    def fork(self, run: PromptRun, count: int) -> tuple[Int32, Int32]:
        """Start `count` pending samples; returns their lanes and the pages onto which the tail page is to be copied.

        When none are pending any more, the run's own tail page goes back: the copies precede its next use.
        """
        request = run.request
        samples = np.arange(request.next_sample, request.next_sample + count, dtype=np.int32)
        lanes = self._start(run, samples, run.request.prompt.size - 1)
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
            self.prefilling.remove(run)
        elif run in self.forking:
            self.forking.remove(run)
        if run.request.shared_run is run:
            run.request.shared_run = None
        self.cache.give(run.own_pages())
        self.cache.release(run.nodes)
        del self.runs[run.key]
        self.dropped.append(run.key)

    # ---- lanes

    def take_tops(self, lanes: Int32) -> dict[int, list[Top]]:
        """The likeliest tokens kept for those of the lanes that want them."""
        if not self.tops:
            return {}
        return {lane: self.tops.pop(lane) for lane in lanes.tolist() if lane in self.tops}

    def _start(self, run: PromptRun, samples: Int32, position: int) -> Int32:
        tables, request, count = self.lanes, run.request, samples.size
        lanes = tables.take(count)
        if self.log.count.size < tables.capacity:
            self.log.resize(tables.capacity)
        where = index(lanes)
        tables.slot[where] = self._slots[self._slots.size - count :]
        self._slots = self._slots[: self._slots.size - count]
        sampling = request.submit.sampling
        tables.position[where] = position
        tables.remaining[where] = tables.max_tokens[where] = request.max_tokens
        tables.request[where] = request.request_id
        tables.sample[where] = samples
        tables.priority[where] = request.submit.priority
        tables.arrival[where] = request.arrival
        tables.prompt_key[where] = run.key
        tables.num_shared[where] = run.pages.size
        tables.can_stop[where] = request.can_stop
        tables.group[where] = request.group
        tables.length_rank[where] = self._ranks(count)
        tables.expected[where] = 0
        tables.stream[where] = request.submit.stream
        tables.single[where] = request.submit.n == 1
        tables.num_logprobs[where] = sampling.num_logprobs
        tables.stop_row[where] = request.stop_row
        tables.min_tokens[where] = sampling.min_tokens
        tables.set_ends(lanes, as_i32(sampling.end_ids))
        run.num_lanes += count
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
        assert slots.size == np.unique(slots).size == self._max_seqs
        owned = [run.own_pages() for run in self.runs.values()]
        owned.append(self.cache.chains.collect(tables.head[held]))
        self.cache.check(owned)
        for run in self.runs.values():
            assert run.num_lanes == int((tables.prompt_key[held] == run.key).sum())
            assert run.num_lanes or run.num_pending
            assert not run.closed
        assert all(run.computed and run.num_pending for run in self.forking)
        assert all(not run.computed and run.lane >= 0 for run in self.prefilling)
