"""Builds steps: which rows decode, which chunks of prompts are computed, what starts, and who must yield.

Knows the running set and the queue; not sampled tokens, nor what is sent to the server.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from toka_async.arrays import EMPTY, Int32, column, i32_column
from toka_async.messages import Prompt, Step
from toka_async.scheduler.admission.policy import Admission
from toka_async.scheduler.admission.preemption import Preemption
from toka_async.scheduler.admission.yielding import Yielding
from toka_async.scheduler.grouping import NO_GROUPS, Grouping
from toka_async.scheduler.output_pages import cache_outputs
from toka_async.scheduler.sequences.prompt_counts import PromptCounts
from toka_async.scheduler.sequences.queues import JobQueue
from toka_async.scheduler.sequences.requests import MASK, PrefillTask, PromptRun, Request, UInt64, sample_seeds
from toka_async.scheduler.sequences.running import RunningSet
from toka_async.scheduler.sequences.step_draft import StepDraft

NO_LANES: Int32 = np.empty(0, np.int32)
NO_SEEDS: UInt64 = np.empty(0, np.uint64)


@dataclass(slots=True)
class StepRecord:
    """What a queued step computes, to make sense of its results.

    lanes: in the order of its sampled tokens. firsts: of them, those whose first token it is. resumed: of these, those
    that went on after a preemption, each with the time of its last token. computed: runs whose prompt is complete with
    this step.
    scored: slot -> request, for chunks whose prompt tokens' log-probs come back. was_queued: before the step ahead of
    it came back.
    """

    step_id: int
    lanes: Int32
    firsts: Int32
    resumed: list[tuple[int, float]]
    computed: list[PromptRun]
    scored: dict[int, Request]
    was_queued: bool = False


class StepBuilder:
    """Makes the next step from the running set and the queue."""

    def __init__(
        self,
        running: RunningSet,
        queue: JobQueue,
        admission: Admission,
        preemption: Preemption,
        max_tokens: int,
        grouping: Grouping | None = None,
    ) -> None:
        self._running = running
        self._queue = queue
        self._admission = admission
        self._seen_preemptions = 0
        self._has_time = True
        self._preemption = preemption
        self._yielding = Yielding(running, queue, preemption, max_tokens)
        self._max_tokens = max_tokens
        self._grouping = grouping
        self._next_step = 0
        self._joining = NO_LANES  # lanes that sampled from their prompt's last chunk in the step before
        self._opened: list[PromptRun] = []  # runs that the ranks do not know yet
        self._opened_keys: set[int] = set()
        self._starting: list[tuple[PromptRun, int]] = []  # opened, without a lane; tokens of their chunk
        self.ready: list[PromptRun] = []  # runs opened with nothing to compute; taken by the core
        self.counts = PromptCounts()

    def build(self, admit: bool = True, most: int = 1) -> tuple[Step, list[StepRecord]] | None:
        """The next step, with a record for each of its passes; None when there is nothing to compute for now.

        Without `admit` nothing new starts as long as something runs. Where the rows stay the same the step makes
        up to `most` passes: one message instead of several.
        """
        running, tables, plan = self._running, self._running.lanes, StepDraft()
        self._has_time = admit
        if admit:
            self._yielding.make_way()
        running.rows = running.rows[tables.holds[running.rows]]
        joined = self._joining[tables.holds[self._joining]]
        num_old = running.rows.size
        running.rows = np.concatenate([running.rows, joined])
        self._grow_rows(plan)
        joined = joined[tables.holds[joined]]
        if joined.size:
            plan.joined.append(joined)
        assert running.rows.size <= num_old + joined.size
        budget = self._max_tokens - running.rows.size
        for run in list(running.prefilling):
            budget -= self._add_chunk(plan, run, budget)
        if admit or not (running.rows.size or plan.chunks):
            self._begin_admission()
            self._admit(plan, budget)
        if not running.rows.size and not plan.chunks:
            assert not plan.joined
            return None
        num_passes = self._num_passes(plan, most) if most > 1 else 1
        for ahead in range(1, num_passes):
            self._grow_ahead(plan, ahead)
        order = EMPTY if self._grouping is None else self._group_rows(self._grouping, plan, reorder=admit)
        step = self._assemble(plan, num_passes, order)
        return step, [self._commit(step.step_id, plan), *(self._repeat(step.step_id + i) for i in range(1, num_passes))]

    def _num_passes(self, plan: StepDraft, most: int) -> int:
        """Passes in which the same rows decode: none ends by length before the last, nothing waits, pages suffice."""
        running, tables = self._running, self._running.lanes
        if plan.chunks or len(self._queue) or running.forking or running.prefilling:
            return 1
        most = min(most, int(tables.remaining[running.rows].min()))
        position, size, room = tables.position[running.rows], running.cache.page_size, running.cache.num_reclaimable
        for ahead in range(1, most):
            room -= int((((position + ahead) % size) == 0).sum())
            if room < 0:
                return ahead
        return most

    def _grow_ahead(self, plan: StepDraft, ahead: int) -> None:
        """Pages for the rows that start one in a later pass."""
        running, tables = self._running, self._running.lanes
        rows = running.rows
        crossing = rows[(tables.position[rows] + ahead) % running.cache.page_size == 0]
        if crossing.size:
            plan.add_pages(tables.slot[crossing], running.grow(crossing))

    # ---- rows that decode

    def _grow_rows(self, plan: StepDraft) -> None:
        """A page for every row whose next token starts one; the youngest yield while there are too few."""
        running, tables = self._running, self._running.lanes
        while True:
            rows = running.rows
            crossing = rows[tables.position[rows] % running.cache.page_size == 0]
            if crossing.size <= running.cache.num_reclaimable:
                break
            self._preemption.preempt_youngest()
            running.rows = rows[tables.holds[rows]]
        if crossing.size:
            plan.add_pages(tables.slot[crossing], running.grow(crossing))

    # ---- prompts

    def _add_chunk(self, plan: StepDraft, run: PromptRun, budget: int) -> int:
        """As much of a prompt as the budget allows; returns the tokens taken."""
        count = min(budget, run.num_to_compute - run.num_computed)
        if count > 0:
            plan.chunks.append((run, run.lane, count))
            self._advance(run, count)
        return count

    def _advance(self, run: PromptRun, count: int) -> None:
        self._running.advance(run, count)
        self.counts.computed(run, count)

    def _admit(self, plan: StepDraft, budget: int) -> None:
        """Start samples and prompts in strict order, as far as slots, pages and the budget allow."""
        running = self._running
        early = running.pending_runs()
        num_reserved = 0  # slots for samples of prompts that this step opens
        while budget > 0:
            run = next((run for run in running.forking if not self._waits(plan, run)), None)
            job = self._queue.first()
            if run is not None and (job is None or run.job.order <= job.order):
                self._start_opened(plan)
                taken = self._fork(plan, run, budget)
                if taken == 0:
                    self._yielding.refused(run.job)
                    break
                budget -= taken
            elif job is not None:
                num_earlier = sum(run.num_pending for run in early if run.job.order < job.order) if early else 0
                num_free = running.num_free_slots - len(self._starting)
                if num_free <= num_reserved + num_earlier and not self._is_alone:
                    break
                opened = self._open(job)
                if opened is None:
                    self._yielding.refused(job)
                    break
                if not opened.computed:
                    num_reserved += opened.num_pending
                    count = min(budget, opened.num_to_compute - opened.num_computed)
                    self._advance(opened, count)
                    self._starting.append((opened, count))
                    budget -= count
                elif self._waits(plan, opened):
                    num_reserved += opened.num_pending
            else:
                break
        self._start_opened(plan)

    @property
    def _is_alone(self) -> bool:
        """Nothing runs: what comes next can have everything."""
        return not self._running.num_running and not self._starting

    def _start_opened(self, plan: StepDraft) -> None:
        """Lanes for the runs that were opened, all at once."""
        if not self._starting:
            return
        running, opened = self._running, self._starting
        self._starting = []
        lanes, tails = running.start_computing([run for run, _ in opened])
        seeds = np.asarray([run.request.submit.seed & MASK for run, _ in opened], np.uint64)
        self._note_admitted(plan, lanes, seeds)
        plan.add_pages(running.lanes.slot[lanes[tails >= 0]], tails[tails >= 0])
        plan.chunks.extend((run, lane, count) for (run, count), lane in zip(opened, lanes.tolist(), strict=True))

    def _waits(self, plan: StepDraft, run: PromptRun) -> bool:
        """Its pages may be such as this step's chunks fill, which decoding rows of the same step do not read."""
        return bool(plan.chunks or self._starting) and run.key in self._opened_keys

    def _begin_admission(self) -> None:
        num_preemptions = self._preemption.num_preemptions - self._preemption.num_yielded
        self._admission.begin(num_preemptions - self._seen_preemptions)
        self._seen_preemptions = num_preemptions

    def _fits(self, job: PrefillTask, num_new_pages: int) -> bool:
        """Alone, any prompt may start: it was checked on arrival that it can end."""
        return self._is_alone or self._admission.prompt_fits(job, num_new_pages)

    def _fork(self, plan: StepDraft, run: PromptRun, budget: int) -> int:
        """Start pending samples of a computed prompt as decoding rows; returns how many."""
        running, tables, tail = self._running, self._running.lanes, run.tail_page
        if not running.num_running:
            self._preemption.drop_idle_runs(run.job.order, 1)
        count = min(run.num_pending, running.num_free_slots, budget, running.cache.num_reclaimable)
        if count > 0:
            count = min(count, max(self._admission.samples_that_fit(run), int(not running.num_running)))
        if count <= 0:
            return 0
        self._admission.add_samples(run, count)
        lanes, copies = running.fork(run, count)
        slots = tables.slot[lanes]
        if copies.size:
            plan.copy_sources.append(np.full(count, tail, np.int32))
            plan.copy_targets.append(copies)
            plan.add_pages(slots, copies)
        else:
            plan.add_pages(slots, running.grow(lanes))
        self._note_admitted(plan, lanes, np.full(count, run.request.submit.seed & MASK, np.uint64))
        plan.joined.append(lanes)
        plan.forked.append(lanes)
        running.rows = np.concatenate([running.rows, lanes])
        return count

    def _open(self, job: PrefillTask) -> PromptRun | None:
        """Open the queue's first job if its pages fit; a lane must start on it when there is something to compute."""
        running = self._running
        num_before = running.cache.num_reclaimable
        run = running.open(job, self._fits)
        if run is None and self._is_alone:
            self._preemption.drop_idle_runs(job.order, running.cache.num_pages)
            num_before = running.cache.num_reclaimable
            run = running.open(job, self._fits)
        if run is None:
            assert not self._is_alone, "a prompt that fits an empty cache does not fit"
            return None
        self._queue.pop()
        self._admission.add_prompt(job, num_before - running.cache.num_reclaimable)
        self._opened.append(run)
        self._opened_keys.add(run.key)
        self.counts.opened(run)
        if run.computed:
            running.add_forking(run)
            self.ready.append(run)
        return run

    @staticmethod
    def _note_admitted(plan: StepDraft, lanes: Int32, seeds: UInt64) -> None:
        plan.admit_lanes.append(lanes)
        plan.seeds.append(seeds)

    # ---- the step

    def _group_rows(self, grouping: Grouping, plan: StepDraft, reorder: bool) -> memoryview:
        """Bring the groups up to date with the rows; the new row order as slots, if it takes one."""
        running, tables = self._running, self._running.lanes
        if not (running.freed or plan.joined or (grouping.wants_order and reorder)):
            return EMPTY
        order = grouping.update(tables.prompt_key[running.rows], running.runs, reorder)
        if order is None:
            return EMPTY
        running.rows = running.rows[order]
        return column(tables.slot[running.rows])

    def _assemble(self, plan: StepDraft, num_passes: int, order: memoryview) -> Step:
        running, tables = self._running, self._running.lanes
        step_id, self._next_step = self._next_step, self._next_step + num_passes
        chunk_lanes, samples = plan.chunk_lanes(), plan.chunk_samples()
        admitted = np.concatenate([NO_LANES, *plan.admit_lanes])
        seeds = np.concatenate([NO_SEEDS, *plan.seeds])
        starts = tables.position[admitted]
        in_chunk = {lane: count for _, lane, count in plan.chunks}
        if in_chunk:  # a chunk admitted with this step has moved its position already
            starts = starts - np.asarray([in_chunk.get(lane, 0) for lane in admitted.tolist()], dtype=np.int32)
        unsent = {run.key for run in self._opened if run.closed}
        groups = NO_GROUPS if self._grouping is None else self._grouping.columns
        step = Step(
            step_id=step_id,
            dropped_prompts=i32_column(key for key in running.take_dropped() if key not in unsent),
            freed=column(np.concatenate([NO_LANES, *running.freed])),
            prompts=tuple(self._prompt(run) for run in self._opened if not run.closed),
            admit_slots=column(tables.slot[admitted]),
            admit_keys=column(tables.prompt_key[admitted]),
            admit_starts=column(starts),
            admit_seeds=column(sample_seeds(seeds, tables.sample[admitted])),
            copy_sources=column(np.concatenate([NO_LANES, *plan.copy_sources])),
            copy_targets=column(np.concatenate([NO_LANES, *plan.copy_targets])),
            page_slots=column(np.concatenate([NO_LANES, *plan.page_slots])),
            page_ids=column(np.concatenate([NO_LANES, *plan.page_ids])),
            joined=column(tables.slot[np.concatenate([NO_LANES, *plan.joined])]),
            order=order,
            group_starts=groups.starts,
            group_rows=groups.rows,
            group_pages=groups.pages,
            chunk_slots=column(tables.slot[chunk_lanes]),
            chunk_lengths=i32_column([count for _, _, count in plan.chunks]),
            chunk_samples=column(samples),
            num_passes=num_passes,
        )
        running.freed, self._opened = [], []
        self._opened_keys.clear()
        return step

    def _commit(self, step_id: int, plan: StepDraft) -> StepRecord:
        """Move the tables past the first pass; what ends with it frees its slot and pages for the next step."""
        running, tables = self._running, self._running.lanes
        chunk_lanes = plan.chunk_lanes()
        sampling = chunk_lanes[plan.chunk_samples()]
        lanes = np.concatenate([running.rows, sampling])
        tables.last_step[chunk_lanes] = step_id
        slots = tables.slot[chunk_lanes].tolist()
        record = StepRecord(
            step_id=step_id,
            lanes=lanes,
            firsts=np.concatenate([*plan.forked, sampling]) if plan.forked else sampling,
            resumed=[
                (lane, run.job.generated.since)
                for run, lane, _ in plan.chunks
                if run.computed and run.job.generated is not None and run.job.generated.tokens.size
            ],
            computed=[run for run, _, _ in plan.chunks if run.computed],
            scored={
                slot: run.request
                for slot, (run, _, _) in zip(slots, plan.chunks, strict=True)
                if run.request.scores is not None
            },
        )
        self._joining = sampling
        for run in record.computed:
            running.finish_computing(run)
        self._pass(step_id, lanes)
        return record

    def _repeat(self, step_id: int) -> StepRecord:
        """Move the tables past a further pass of the decoding rows."""
        rows = self._running.rows
        self._pass(step_id, rows)
        return StepRecord(step_id=step_id, lanes=rows, firsts=NO_LANES, resumed=[], computed=[], scored={})

    def _pass(self, step_id: int, lanes: Int32) -> None:
        """The decoding rows are among the lanes, which all sample; the others' chunks have moved them already."""
        running, tables = self._running, self._running.lanes
        tables.position[running.rows] += 1
        tables.remaining[lanes] -= 1
        tables.last_step[lanes] = step_id
        ended = lanes[tables.remaining[lanes] == 0]
        if self._has_time:
            cache_outputs(running, ended)
        running.release(ended)

    @staticmethod
    def _prompt(run: PromptRun) -> Prompt:
        sampling = run.request.submit.sampling
        if run.request.scores is None and sampling.num_prompt_logprobs >= 0:  # they were sent before a preemption
            sampling = replace(sampling, num_prompt_logprobs=-1)
        return Prompt(
            key=run.key,
            token_ids=column(run.job.token_ids) if run.job.again else run.request.submit.prompt,
            num_prompt=run.request.prompt.size,
            pages=column(run.pages),
            sampling=sampling,
        )
