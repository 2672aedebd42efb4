"""Takes slots and pages back from running work, which is recomputed later: the youngest when the cache is too small,
and others when work of a higher priority waits (`yielding`).

A preempted sequence gives up its slot and pages at once, but runs again only when its queued steps have come back:
their tokens are valid and belong to it. Knows the running set and the queue.
"""

from __future__ import annotations

import numpy as np

from toka_async.scheduler.sequences.queues import PrefillQueue
from toka_async.scheduler.sequences.requests import Generated, PrefillTask, PromptRun, Request
from toka_async.scheduler.sequences.running import RunningSet

Order = tuple[int, int, int]


class Preemption:
    """Chooses and preempts; `draining` holds sequences whose last steps are still on their way."""

    def __init__(self, running: RunningSet, queue: PrefillQueue, requests: dict[int, Request]) -> None:
        self._running = running
        self._queue = queue
        self._requests = requests
        self.draining: dict[int, Request] = {}
        self.completed = -1  # newest complete step
        self.completed_at = 0.0
        self.num_preemptions = 0
        self.num_yielded = 0  # preemptions for a higher priority

    def preempt_youngest(self) -> None:
        """Preempt the work that is last in order."""
        running = self._running
        idle, seq = self._find_youngest_idle(), running.table.find_youngest()
        assert seq >= 0 or idle is not None, "nothing to preempt"
        if idle is not None and (seq < 0 or idle.task.order > running.table.order(seq)):
            self._requeue_idle(idle)
        else:
            self._preempt(seq)
        self.num_preemptions += 1

    def drop_idle_runs(self, order: Order, num_pages: int) -> None:
        """Requeue computed prompts after `order` that no sequence uses, until sequences can grow by `num_pages`."""
        while self._running.num_growable < num_pages:
            idle = self._find_youngest_idle()
            if idle is None or idle.task.order <= order:
                return
            self._requeue_idle(idle)
            self.num_preemptions += 1

    def retract(self) -> None:
        """Preempt all that runs."""
        for seq in self._running.table.sort_last_first().tolist():
            if self._running.table.holds[seq]:
                self.make_way(seq)
        while (idle := self._find_youngest_idle()) is not None:
            self._requeue_idle(idle)

    def restart_prompts(self) -> None:
        """Requeue what has no token of its prompt yet, so that no prompt is of two versions of the weights.

        Samples that run keep the prompt that they share. No step is in flight.
        """
        running = self._running
        table = running.table
        for seq in table.sort_last_first().tolist():
            if table.holds[seq] and running.runs[int(table.prompt_key[seq])].seq == seq:
                self._preempt(seq)
        for run in list(running.forking):
            if run.num_seqs:
                running.stop_forking(run)
                self._requeue(run.task)
            else:
                self._requeue_idle(run)

    def make_way(self, seq: int) -> None:
        self._preempt(seq)
        self.num_preemptions += 1
        self.num_yielded += 1

    def requeue_drained(self, step_id: int, now: float) -> None:
        """Requeue preempted sequences that waited for this completed step and still live."""
        self.completed, self.completed_at = step_id, now
        table = self._running.table
        for seq in [seq for seq in self.draining if table.last_step[seq] <= step_id]:
            self._requeue_seq(seq, self.draining.pop(seq))

    def _find_youngest_idle(self) -> PromptRun | None:
        return next((run for run in reversed(self._running.forking) if run.num_seqs == 0), None)

    def _requeue_idle(self, run: PromptRun) -> None:
        self._running.close(run)
        self._requeue(run.task)

    def _requeue(self, task: PrefillTask) -> None:
        again = PrefillTask(task.request, task.sample, task.token_ids, task.generated, was_preempted=True)
        self._queue.push(again)

    def _preempt(self, seq: int) -> None:
        running = self._running
        seqs = np.asarray([seq], np.int32)
        run = running.runs[int(running.table.prompt_key[seq])]
        if run.seq != seq:
            running.release(seqs)
            request = self._requests[int(running.table.request[seq])]
            if running.table.last_step[seq] <= self.completed:
                self._requeue_seq(seq, request)
            else:
                self.draining[seq] = request
            return
        running.table.alive[seq] = False  # it was computing its prompt, which starts over
        running.log.drop(seqs)
        self._running.tops.pop(seq, None)
        running.release(seqs)
        if not run.closed:
            running.close(run)
        running.retire(seqs, self.completed)
        self._requeue(run.task)

    def _requeue_seq(self, seq: int, request: Request) -> None:
        running = self._running
        if not running.table.alive[seq]:
            return  # it ended or was cancelled meanwhile
        seqs = np.asarray([seq], np.int32)
        sample = int(running.table.sample[seq])
        _, columns = running.log.take(seqs)
        generated = Generated(columns, self._running.tops.pop(seq, None), self.completed_at)
        running.table.alive[seq] = False
        running.retire(seqs, self.completed)
        tokens = np.concatenate([request.prompt, generated.tokens])
        self._queue.push(PrefillTask(request, sample, tokens, generated, was_preempted=True))
