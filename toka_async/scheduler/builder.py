"""Builds steps: chooses the rows that decode, the chunks of prompts, what starts, and what must yield.

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
from toka_async.scheduler.sequences.queues import PrefillQueue
from toka_async.scheduler.sequences.requests import MASK, PrefillTask, PromptRun, Request, UInt64, sample_seeds
from toka_async.scheduler.sequences.running import RunningSet
from toka_async.scheduler.sequences.step_draft import StepDraft
from toka_async.scheduler.step_budget import StepBudget, StepLimits, count_pairs
from toka_async.scheduler.time_predictor import StepWork, TimePredictor

NO_SEQS: Int32 = np.empty(0, np.int32)
NO_SEEDS: UInt64 = np.empty(0, np.uint64)


@dataclass(slots=True)
class StepRecord:
    """A queued step, kept to interpret its results.

    seqs: the sequences that sample, in the order of the results. firsts: those that sample their first token. resumed:
    sequences that continue after a preemption, each with the time of its last token. computed: runs whose prompt this
    step completes. scored: slot -> request, for chunks whose prompt log-probs come back. work: what it computes.
    was_queued: the step was queued before the one ahead of it came back.
    """

    step_id: int
    seqs: Int32
    firsts: Int32
    resumed: list[tuple[int, float]]
    computed: list[PromptRun]
    scored: dict[int, Request]
    work: StepWork
    was_queued: bool = False


class StepBuilder:
    def __init__(
        self,
        running: RunningSet,
        queue: PrefillQueue,
        admission: Admission,
        preemption: Preemption,
        max_tokens: int,
        grouping: Grouping | None,
        predictor: TimePredictor,
        limits: StepLimits,
    ) -> None:
        self._running = running
        self._queue = queue
        self._admission = admission
        self._seen_preemptions = 0
        self._has_time = True
        self._preemption = preemption
        self._yielding = Yielding(running, queue, preemption, self._count_startable)
        self._max_tokens = max_tokens
        self._grouping = grouping
        self._predictor = predictor
        self._limits = limits
        self._next_step = 0
        self._num_keys = 0  # that the newest step's decoding rows read
        self._joining = NO_SEQS  # their prompt's last chunk was in the step before
        self._opened: list[PromptRun] = []  # the ranks do not know them yet
        self._opened_keys: set[int] = set()
        self._starting: list[tuple[PromptRun, int]] = []  # opened, without a sequence; tokens of their chunk
        self.ready: list[PromptRun] = []  # opened with nothing to compute; the core takes them
        self.counts = PromptCounts()

    def build(self, now: float, admit: bool = True, most: int = 1) -> tuple[Step, list[StepRecord]] | None:
        """Build the next step and a record for each of its passes; None if there is nothing to compute now.

        Without `admit` nothing new starts as long as something runs. Where the rows stay the same, the step makes up to
        `most` passes: one message instead of several.
        """
        running, table, plan = self._running, self._running.table, StepDraft()
        self._has_time = admit
        if admit:
            self._yielding.make_way()
        running.rows = running.rows[table.holds[running.rows]]
        joined = self._joining[table.holds[self._joining]]
        num_old = running.rows.size
        running.rows = np.concatenate([running.rows, joined])
        if running.windows is not None:
            running.windows.drop_passed(running.rows, running.prefilling)
        self._grow_rows(plan)
        joined = joined[table.holds[joined]]
        if joined.size:
            plan.joined.append(joined)
        assert running.rows.size <= num_old + joined.size
        budget = self._make_budget()
        for run in list(running.prefilling):
            self._add_chunk(plan, run, budget)
        if admit or not (running.rows.size or plan.chunks):
            self._begin_admission()
            self._admit(plan, budget, now)
        if not running.rows.size and not plan.chunks:
            assert not plan.joined
            return None
        num_passes = self._count_passes(plan, most) if most > 1 else 1
        for ahead in range(1, num_passes):
            self._grow_ahead(plan, ahead)
        order = EMPTY if self._grouping is None else self._group_rows(self._grouping, plan, reorder=admit)
        step = self._assemble(plan, num_passes, order)
        return step, [
            self._commit(step.step_id, plan),
            *(self._commit_repeat(step.step_id + i) for i in range(1, num_passes)),
        ]

    def _count_passes(self, plan: StepDraft, most: int) -> int:
        """Count passes in which the same rows decode: none ends early, nothing waits, pages suffice."""
        running, table = self._running, self._running.table
        if plan.chunks or len(self._queue) or running.forking or running.prefilling:
            return 1
        most = min(most, int(table.remaining[running.rows].min()))
        if running.windows is not None:
            most = min(most, running.windows.most_passes)
        position, size, room = table.position[running.rows], running.cache.page_size, running.num_growable
        for ahead in range(1, most):
            room -= int((((position + ahead) % size) == 0).sum())
            if room < 0:
                return ahead
        return most

    def _grow_ahead(self, plan: StepDraft, ahead: int) -> None:
        """Add pages for the rows that start a page in a later pass."""
        running, table = self._running, self._running.table
        rows = running.rows
        crossing = rows[(table.position[rows] + ahead) % running.cache.page_size == 0]
        if crossing.size:
            plan.add_pages(table.slot[crossing], running.grow(crossing))

    # ---- rows that decode

    def _grow_rows(self, plan: StepDraft) -> None:
        """Add a page for every row whose next token starts one; preempt the youngest while pages are too few."""
        running, table = self._running, self._running.table
        while True:
            rows = running.rows
            crossing = rows[table.position[rows] % running.cache.page_size == 0]
            if crossing.size <= running.num_growable and (rows.size or self._can_advance()):
                break
            self._preemption.preempt_youngest()
            running.rows = rows[table.holds[rows]]
        if crossing.size:
            plan.add_pages(table.slot[crossing], running.grow(crossing))

    def _can_advance(self) -> bool:
        """Whether the first prompt that is being computed, if there is one, can go on."""
        first, windows = next(iter(self._running.prefilling), None), self._running.windows
        return first is None or windows is None or windows.count_room(first) > 0

    # ---- prompts

    def _make_budget(self) -> StepBudget:
        """Make the budget of a step with the running rows, with time for prompts if there are any."""
        num_rows = self._running.rows.size
        budget = StepBudget(self._predictor, self._limits, self._max_tokens - num_rows)
        if self._running.prefilling or len(self._queue):
            # Most rows were in the step before, with a key less each. Those that joined or left are few.
            budget.allow_prompts(StepWork(num_rows, self._num_keys + num_rows), self._is_streaming())
        return budget

    def _count_startable(self) -> int:
        """Count the tokens of prompts that a step can compute if nothing decodes."""
        budget = StepBudget(self._predictor, self._limits, self._max_tokens)
        budget.allow_prompts(StepWork(0, 0), self._is_streaming())
        return budget.count_tokens()

    def _is_streaming(self) -> bool:
        """Whether a stream's tokens would wait for other work in the step: a row's, or those of a prompt of several."""
        table, prefilling, first = self._running.table, self._running.prefilling, self._queue.first()
        num_streams = int(np.count_nonzero(table.stream & table.holds))
        if len(prefilling) + len(self._queue) == 1:  # the prompt itself waits for nothing else
            return num_streams > sum(run.request.submit.stream for run in prefilling)
        return num_streams > 0 or (first is not None and first.request.submit.stream)

    def _add_chunk(self, plan: StepDraft, run: PromptRun, budget: StepBudget) -> None:
        """Add as much of a prompt as the budget and window pages allow."""
        count = self._take_chunk(run, budget)
        if count > 0:
            plan.chunks.append((run, run.seq, count))
            self._advance(run, count)

    def _take_chunk(self, run: PromptRun, budget: StepBudget) -> int:
        left, windows = run.num_to_compute - run.num_computed, self._running.windows
        return budget.take_chunk(run.num_computed, left if windows is None else min(left, windows.count_room(run)))

    def _advance(self, run: PromptRun, count: int) -> None:
        self._running.advance(run, count)
        self.counts.count_computed(run, count)

    def _admit(self, plan: StepDraft, budget: StepBudget, now: float) -> None:
        """Start samples and prompts in strict order, as far as slots, pages and the budget allow."""
        running = self._running
        early = running.pending_runs()
        num_reserved = 0  # slots for samples of prompts that this step opens
        while budget.tokens > 0:
            run = next((run for run in running.forking if not self._waits(plan, run)), None)
            task = self._queue.first()
            if run is not None and (task is None or run.task.order <= task.order):
                self._start_opened(plan)
                taken = self._fork(plan, run, budget.tokens)
                if taken == 0:
                    self._yielding.note_refused(run.task)
                    break
                budget.take_rows(taken)
            elif task is not None and budget.has_room:
                num_earlier = sum(run.num_pending for run in early if run.task.order < task.order) if early else 0
                num_free = running.num_free_slots - len(self._starting)
                if num_free <= num_reserved + num_earlier and not self._is_alone:
                    break
                opened = self._open(task, now)
                if opened is None:
                    self._yielding.note_refused(task)
                    break
                if not opened.computed:
                    num_reserved += opened.num_pending
                    count = self._take_chunk(opened, budget)
                    self._advance(opened, count)
                    self._starting.append((opened, count))
                elif self._waits(plan, opened):
                    num_reserved += opened.num_pending
            else:
                break
        self._start_opened(plan)

    @property
    def _is_alone(self) -> bool:
        """Whether nothing runs, so that the next prompt may have everything."""
        return not self._running.num_running and not self._starting

    def _start_opened(self, plan: StepDraft) -> None:
        if not self._starting:
            return
        running, opened = self._running, self._starting
        self._starting = []
        seqs, tails = running.start_computing([run for run, _ in opened])
        seeds = np.asarray([run.request.submit.seed & MASK for run, _ in opened], np.uint64)
        self._note_admitted(plan, seqs, seeds, np.asarray([run.begins_with for run, _ in opened], np.int32))
        plan.add_pages(running.table.slot[seqs[tails >= 0]], tails[tails >= 0])
        plan.chunks.extend((run, seq, count) for (run, count), seq in zip(opened, seqs.tolist(), strict=True))

    def _waits(self, plan: StepDraft, run: PromptRun) -> bool:
        """Whether the run may share pages that this step's chunks fill, too late for rows of the same step."""
        return bool(plan.chunks or self._starting) and run.key in self._opened_keys

    def _begin_admission(self) -> None:
        num_preemptions = self._preemption.num_preemptions - self._preemption.num_yielded
        self._admission.begin(num_preemptions - self._seen_preemptions)
        self._seen_preemptions = num_preemptions

    def _fits(self, task: PrefillTask, num_new_pages: int) -> bool:
        """Whether a prompt may start. Alone, any may: its arrival checked that it can end."""
        return self._is_alone or self._admission.prompt_fits(task, num_new_pages)

    def _fork(self, plan: StepDraft, run: PromptRun, most: int) -> int:
        """Start pending samples of a computed prompt as decoding rows; returns how many."""
        running, table, tail, snapshot = self._running, self._running.table, run.tail_page, run.snapshot
        if not running.num_running:
            self._preemption.drop_idle_runs(run.task.order, 1)
        count = min(run.num_pending, running.num_free_slots, most, running.num_growable)
        if count > 0:
            count = min(count, max(self._admission.count_fitting_samples(run), int(not running.num_running)))
        if count <= 0:
            return 0
        self._admission.add_samples(run, count)
        seqs, copies = running.fork(run, count)
        slots = table.slot[seqs]
        if copies.size:
            plan.copy_sources.append(np.full(count, tail, np.int32))
            plan.copy_targets.append(copies)
            plan.add_pages(slots, copies)
        else:
            plan.add_pages(slots, running.grow(seqs))
        seeds = np.full(count, run.request.submit.seed & MASK, np.uint64)
        self._note_admitted(plan, seqs, seeds, np.full(count, snapshot, np.int32))
        plan.joined.append(seqs)
        plan.forked.append(seqs)
        running.rows = np.concatenate([running.rows, seqs])
        return count

    def _open(self, task: PrefillTask, now: float) -> PromptRun | None:
        """Open the queue's first task if its pages fit. Tokens to compute still need a sequence (`_start_opened`)."""
        running = self._running
        num_before = running.cache.num_reclaimable
        run = running.open(task, self._fits)
        if run is None and self._is_alone:
            self._preemption.drop_idle_runs(task.order, running.cache.num_pages)
            num_before = running.cache.num_reclaimable
            run = running.open(task, self._fits)
        if run is None:
            assert not self._is_alone, "a prompt that fits an empty cache does not fit"
            return None
        self._queue.pop()
        self._admission.add_prompt(task, num_before - running.cache.num_reclaimable)
        self._opened.append(run)
        self._opened_keys.add(run.key)
        self.counts.count_opened(run, now)
        if run.computed:
            running.add_forking(run)
            self.ready.append(run)
        return run

    @staticmethod
    def _note_admitted(plan: StepDraft, seqs: Int32, seeds: UInt64, snapshots: Int32) -> None:
        plan.admit_seqs.append(seqs)
        plan.seeds.append(seeds)
        plan.snapshots.append(snapshots)

    # ---- the step

    def _group_rows(self, grouping: Grouping, plan: StepDraft, reorder: bool) -> memoryview:
        """Update the groups for the rows; returns the new row order as slots, or EMPTY if the order stays."""
        running, table = self._running, self._running.table
        if not (running.freed or plan.joined or (grouping.wants_order and reorder)):
            return EMPTY
        order = grouping.update(table.prompt_key[running.rows], running.runs, reorder)
        if order is None:
            return EMPTY
        running.rows = running.rows[order]
        return column(table.slot[running.rows])

    def _assemble(self, plan: StepDraft, num_passes: int, order: memoryview) -> Step:
        running, table = self._running, self._running.table
        step_id, self._next_step = self._next_step, self._next_step + num_passes
        chunk_seqs, samples = plan.chunk_seqs(), plan.chunk_samples()
        admitted = np.concatenate([NO_SEQS, *plan.admit_seqs])
        seeds = np.concatenate([NO_SEEDS, *plan.seeds])
        starts = table.position[admitted]
        in_chunk = {seq: count for _, seq, count in plan.chunks}
        if in_chunk:  # a chunk admitted with this step has advanced its position already
            starts = starts - np.asarray([in_chunk.get(seq, 0) for seq in admitted.tolist()], dtype=np.int32)
        has_states = running.cache.snapshots.num_snapshots > 0
        if has_states:
            plan.saves = [save for run, _, count in plan.chunks for save in running.list_saves(run, count)]
        unsent = {run.key for run in self._opened if run.closed}
        groups = NO_GROUPS if self._grouping is None else self._grouping.columns
        step = Step(
            step_id=step_id,
            dropped_prompts=i32_column(key for key in running.take_dropped() if key not in unsent),
            freed=column(np.concatenate([NO_SEQS, *running.freed])),
            prompts=tuple(self._make_prompt(run) for run in self._opened if not run.closed),
            admit_slots=column(table.slot[admitted]),
            admit_keys=column(table.prompt_key[admitted]),
            admit_starts=column(starts),
            admit_seeds=column(sample_seeds(seeds, table.sample[admitted])),
            admit_snapshots=column(np.concatenate([NO_SEQS, *plan.snapshots])) if has_states else EMPTY,
            copy_sources=column(np.concatenate([NO_SEQS, *plan.copy_sources])),
            copy_targets=column(np.concatenate([NO_SEQS, *plan.copy_targets])),
            page_slots=column(np.concatenate([NO_SEQS, *plan.page_slots])),
            page_ids=column(np.concatenate([NO_SEQS, *plan.page_ids])),
            window_pages=EMPTY if running.windows is None else column(running.windows.pool.take_changed()),
            joined=column(table.slot[np.concatenate([NO_SEQS, *plan.joined])]),
            order=order,
            group_starts=groups.starts,
            group_rows=groups.rows,
            group_pages=groups.pages,
            chunk_slots=column(table.slot[chunk_seqs]),
            chunk_lengths=i32_column([count for _, _, count in plan.chunks]),
            chunk_samples=column(samples),
            save_slots=column(table.slot[[save.seq for save in plan.saves]]) if plan.saves else EMPTY,
            save_lengths=i32_column([save.length for save in plan.saves]),
            save_snapshots=i32_column([save.snapshot for save in plan.saves]),
            num_passes=num_passes,
        )
        running.freed, self._opened = [], []
        self._opened_keys.clear()
        return step

    def _commit(self, step_id: int, plan: StepDraft) -> StepRecord:
        """Advance the tables by the first pass; what ends with it frees its slot and pages for the next step."""
        running, table = self._running, self._running.table
        for save in plan.saves:
            if save.node is not None:
                running.cache.snapshots.attach(save.node, save.snapshot)
        chunk_seqs = plan.chunk_seqs()
        sampling = chunk_seqs[plan.chunk_samples()]
        seqs = np.concatenate([running.rows, sampling])
        table.last_step[chunk_seqs] = step_id
        slots = table.slot[chunk_seqs].tolist()
        num_pairs = sum(count_pairs(run.num_computed - count, count) for run, _, count in plan.chunks)
        num_tokens = running.rows.size + sum(count for _, _, count in plan.chunks)
        computed = [run for run, _, _ in plan.chunks if run.computed]
        self._joining = sampling
        for run in computed:
            running.finish_computing(run)
        self._advance_rows(step_id, seqs)
        return StepRecord(
            step_id=step_id,
            seqs=seqs,
            firsts=np.concatenate([*plan.forked, sampling]) if plan.forked else sampling,
            resumed=[
                (seq, run.task.generated.since)
                for run, seq, _ in plan.chunks
                if run.computed and run.task.generated is not None and run.task.generated.tokens.size
            ],
            computed=computed,
            scored={
                slot: run.request
                for slot, (run, _, _) in zip(slots, plan.chunks, strict=True)
                if run.request.scores is not None
            },
            work=StepWork(num_tokens, self._num_keys, num_pairs),
        )

    def _commit_repeat(self, step_id: int) -> StepRecord:
        rows = self._running.rows
        self._advance_rows(step_id, rows)
        work = StepWork(rows.size, self._num_keys)
        return StepRecord(step_id=step_id, seqs=rows, firsts=NO_SEQS, resumed=[], computed=[], scored={}, work=work)

    def _advance_rows(self, step_id: int, seqs: Int32) -> None:
        """Advance the tables by a pass in which `seqs` sample: the decoding rows, and chunks that are advanced."""
        running, table = self._running, self._running.table
        contexts = table.position[running.rows] + 1
        table.position[running.rows] = contexts
        num_spared = 0 if self._grouping is None else self._grouping.columns.num_spared
        self._num_keys = int(contexts.sum()) - num_spared * running.cache.page_size
        table.remaining[seqs] -= 1
        table.last_step[seqs] = step_id
        ended = seqs[table.remaining[seqs] == 0]
        if self._has_time:
            cache_outputs(running, ended)
        running.release(ended)

    @staticmethod
    def _make_prompt(run: PromptRun) -> Prompt:
        sampling = run.request.submit.sampling
        if run.request.scores is None and sampling.num_prompt_logprobs >= 0:  # its scores were sent before a preemption
            sampling = replace(sampling, num_prompt_logprobs=-1)
        return Prompt(
            key=run.key,
            token_ids=column(run.task.token_ids) if run.task.was_preempted else run.request.submit.prompt,
            num_prompt=run.request.prompt.size,
            pages=column(run.pages),
            sampling=sampling,
        )
