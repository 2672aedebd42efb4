"""Taking slots and pages back from running work by recompute: when the cache is too small, the youngest first, and
where work of a higher priority waits (`yielding`).

A preempted lane gives up its slot and pages at once, but runs again only when its queued steps have come back: their
tokens are valid and belong to it. Knows the running set and the queue.
"""

from __future__ import annotations

import numpy as np

from toka_async.scheduler.sequences.queues import JobQueue
from toka_async.scheduler.sequences.requests import Generated, PrefillTask, PromptRun, Request
from toka_async.scheduler.sequences.running import RunningSet

Order = tuple[int, int, int]


class Preemption:
    """Chooses and preempts; keeps the lanes whose last steps are still on their way (`draining`)."""

    def __init__(self, running: RunningSet, queue: JobQueue, requests: dict[int, Request]) -> None:
        self._running = running
        self._queue = queue
        self._requests = requests
        self.draining: dict[int, Request] = {}
        self.completed = -1  # the newest step that is complete
        self.completed_at = 0.0
        self.num_preemptions = 0
        self.num_yielded = 0  # of them, those that made way for a higher priority

    def preempt_youngest(self) -> None:
        """Make the work that is last in order give back its pages."""
        running = self._running
        idle, lane = self._youngest_idle(), running.lanes.youngest()
        assert lane >= 0 or idle is not None, "nothing to preempt"
        if idle is not None and (lane < 0 or idle.job.order > running.lanes.order(lane)):
            self._requeue_idle(idle)
        else:
            self._preempt(lane)
        self.num_preemptions += 1

    def drop_idle_runs(self, order: Order, num_pages: int) -> None:
        """Requeue computed prompts that are later than `order` and that no lane uses, until `num_pages` are free."""
        while self._running.cache.num_reclaimable < num_pages:
            idle = self._youngest_idle()
            if idle is None or idle.job.order <= order:
                return
            self._requeue_idle(idle)
            self.num_preemptions += 1

    def make_way(self, lane: int) -> None:
        """The lane gives back its slot and its pages, for work of a higher priority."""
        self._preempt(lane)
        self.num_preemptions += 1
        self.num_yielded += 1

    def requeue_drained(self, step_id: int, now: float) -> None:
        """A step is complete: preempted lanes that waited for it and still live go back to the queue."""
        self.completed, self.completed_at = step_id, now
        tables = self._running.lanes
        for lane in [lane for lane in self.draining if tables.last_step[lane] <= step_id]:
            self._requeue_lane(lane, self.draining.pop(lane))

    def _youngest_idle(self) -> PromptRun | None:
        return next((run for run in reversed(self._running.forking) if run.num_lanes == 0), None)

    def _requeue_idle(self, run: PromptRun) -> None:
        self._running.close(run)
        self._queue.push(self._again(run.job))

    @staticmethod
    def _again(job: PrefillTask) -> PrefillTask:
        return PrefillTask(job.request, job.sample, job.token_ids, job.generated, again=True)

    def _preempt(self, lane: int) -> None:
        running = self._running
        lanes = np.asarray([lane], np.int32)
        run = running.runs[int(running.lanes.prompt_key[lane])]
        if run.lane != lane:
            running.release(lanes)
            request = self._requests[int(running.lanes.request[lane])]
            if running.lanes.last_step[lane] <= self.completed:
                self._requeue_lane(lane, request)
            else:
                self.draining[lane] = request
            return
        running.lanes.alive[lane] = False  # it was computing its prompt, which starts anew
        running.log.drop(lanes)
        self._running.tops.pop(lane, None)
        running.release(lanes)
        if not run.closed:
            running.close(run)
        running.retire(lanes, self.completed)
        self._queue.push(self._again(run.job))

    def _requeue_lane(self, lane: int, request: Request) -> None:
        running = self._running
        if not running.lanes.alive[lane]:
            return  # it ended, or its client left, meanwhile
        lanes = np.asarray([lane], np.int32)
        sample = int(running.lanes.sample[lane])
        _, tokens, logprobs = running.log.take(lanes)
        generated = Generated(tokens, logprobs, self._running.tops.pop(lane, None), self.completed_at)
        running.lanes.alive[lane] = False
        running.retire(lanes, self.completed)
        self._queue.push(PrefillTask(request, sample, np.concatenate([request.prompt, tokens]), generated, again=True))
