"""The scheduler of one replica, sans IO: requests in, steps out, results in, tokens out.

Sockets drive it in production, lists in tests. Every point in time is passed in, in seconds of one clock. Loads no
torch, no sockets and no event loop; knows token ids, not text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import numpy as np

from toka_async.arrays import Float32, Int32, as_i32, as_i64
from toka_async.control import (
    RANK_ACTIONS,
    AbandonUpdate,
    Abort,
    AnyAction,
    BeginUpdate,
    CommitUpdate,
    Control,
    ControlDone,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    SetVersion,
    Sleep,
)
from toka_async.messages import (
    AskStats,
    Cancels,
    DropStop,
    EndSample,
    ExpertLoads,
    Ready,
    Reason,
    StageTimes,
    Stats,
    Step,
    StepDone,
    StopMask,
    Submit,
    Submits,
    ToScheduler,
    ToServer,
)
from toka_async.scheduler.aborts import send_aborted
from toka_async.scheduler.admission.lookahead import LookAhead
from toka_async.scheduler.admission.policy import Admission
from toka_async.scheduler.admission.preemption import Preemption
from toka_async.scheduler.builder import StepBuilder, StepRecord
from toka_async.scheduler.depth import StepDepth
from toka_async.scheduler.grouping import Grouping
from toka_async.scheduler.pauses import PauseState
from toka_async.scheduler.rank_orders import RankOrders
from toka_async.scheduler.replies import Replies
from toka_async.scheduler.results import ResultHandler
from toka_async.scheduler.sequences.queues import PrefillQueue
from toka_async.scheduler.sequences.requests import PrefillScores, PrefillTask, Request, Top
from toka_async.scheduler.sequences.running import RunningSet
from toka_async.scheduler.sequences.token_log import TokenColumns
from toka_async.scheduler.statistics import StatsSource
from toka_async.scheduler.step_budget import StepLimits
from toka_async.scheduler.stop_masks import StopTable
from toka_async.scheduler.time_predictor import TimePredictor

NO_SCORES: Float32 = np.empty(0, np.float32)
NO_LIMITS = StepLimits()


class Core:
    """Requests, the running set, and the steps that are queued on the ranks.

    Args:
        ready: what the ranks can hold.
        max_tokens: tokens of one step, at least `ready.max_seqs`.
        step_limits: time of a step that computes prompts.
        steps_ahead: steps queued on the ranks at once, at most or exactly (`StepDepth`).
        pipeline_lag: share of a step's time by which the first rank finishes before the last one.
        prefix: reuse cached pages of earlier prompts.
        admission: makes the policy that decides how much may start.
        group_min_seqs: decoding rows of the smallest group with a shared prefix, at least 2; 0: no groups.
        group_min_tokens: tokens of the shortest such prefix.
    """

    def __init__(
        self,
        ready: Ready,
        *,
        max_tokens: int,
        step_limits: StepLimits = NO_LIMITS,
        steps_ahead: int | Literal["auto"] = 2,
        pipeline_lag: float = 0.0,
        prefix: bool = True,
        admission: Callable[[RunningSet], Admission] = LookAhead,
        group_min_seqs: int = 0,
        group_min_tokens: int = 0,
    ) -> None:
        assert max_tokens >= ready.max_seqs
        self._ready = ready
        self._depth = (
            StepDepth(lag=pipeline_lag) if steps_ahead == "auto" else StepDepth(steps_ahead, steps_ahead, pipeline_lag)
        )
        self._requests: dict[int, Request] = {}
        self._queue = PrefillQueue()
        self._stops = StopTable(ready.vocab_size)
        self._running = RunningSet(ready, prefix)
        self._replies = Replies(self._running.table, ready.vocab_size)
        self._preemption = Preemption(self._running, self._queue, self._requests)
        self._admission = admission(self._running)
        group_min_pages = max(1, -(-group_min_tokens // ready.page_size))
        self._grouping = Grouping(group_min_seqs, group_min_pages) if group_min_seqs else None
        self._predictor = TimePredictor(ready.token_seconds)
        self._builder = StepBuilder(
            self._running,
            self._queue,
            self._admission,
            self._preemption,
            max_tokens,
            self._grouping,
            self._predictor,
            step_limits,
        )
        self._stats = StatsSource(
            self._running, self._builder, self._preemption, self._depth, self._admission, self._predictor
        )
        self._results = ResultHandler(
            self._running,
            self._requests,
            self._replies,
            self._stops,
            self._admission,
            self._preemption,
            self._stats,
        )
        self._in_flight: deque[StepRecord] = deque()
        self._num_arrived = 0
        self._pauses = PauseState()
        self._orders = RankOrders(max(1, len(ready.ranks)))
        self._holds_steps = False  # because of these two

    # ---- from the server

    def receive(self, message: ToScheduler, now: float) -> None:
        match message:
            case Submits():
                for submit in split_submits(message):
                    self.submit(submit, now)
            case Cancels():
                for request_id in as_i32(message.request_ids).tolist():
                    self.cancel(request_id)
            case EndSample():
                self.end_sample(message)
            case StopMask():
                self._stops.add(message)
            case DropStop():
                self._stops.drop(message.stop_id)
            case AskStats():
                self._stats.note_question(message.number, message.forecast)
            case Control():
                self.control(message)

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a request; one that can never run fails at once."""
        problem = self._find_problem(submit)
        if problem is not None:
            self._replies.add_failure(submit.request_id, problem)
            return
        prompt, sampling = as_i32(submit.prompt), submit.sampling
        request = Request(
            submit=submit,
            prompt=prompt,
            arrival=self._num_arrived,
            since=now,
            num_open=submit.n,
            stop_row=self._stops.row(submit.stop_id),
            scores=_make_scores(prompt.size - 1, sampling.num_prompt_logprobs),
        )
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._stats.num_open += submit.n
        if request.is_prompt_only and (prompt.size == 1 or request.scores is None):
            self._finish_prompt(request)
            return
        self._queue.push(
            PrefillTask(request, sample=0 if submit.n == 1 and not request.is_prompt_only else -1, token_ids=prompt)
        )

    def _find_problem(self, submit: Submit) -> str | None:
        ready, prompt = self._ready, len(submit.prompt) // 4
        if submit.request_id in self._requests:
            return f"request id {submit.request_id} is in use"
        if prompt < 1 or submit.n < 1 or submit.max_tokens < 0:
            return "a request needs a prompt token, n of 1 or more and max_tokens of 0 or more"
        total = prompt + submit.max_tokens
        if total > ready.max_context:
            return f"prompt and max_tokens are {total} tokens, the context has {ready.max_context}"
        pages = -(-total // ready.page_size) + (submit.n > 1)
        if pages > ready.num_pages:
            return (
                f"prompt and max_tokens are {total} tokens, the KV cache holds {ready.num_pages * ready.page_size}; "
                "raise cache.num_tokens or lower max_tokens"
            )
        return None

    def cancel(self, request_id: int) -> None:
        """End all samples of a request without an answer; ignores unknown ids, which have ended."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._stats.num_open -= request.num_open
        self._admission.close_request(request)
        for task in list(request.waiting.values()):
            self._queue.cancel(task)
        if request.num_found < 0:
            return  # its prompt was never opened
        request.next_sample = request.submit.n
        self._results.end_seqs(self._running.table.find_living(request_id))
        if request.shared_run is not None:  # no sequence held it
            self._running.close(request.shared_run)

    def end_sample(self, message: EndSample) -> None:
        """End a sample after `num_tokens` tokens because of a stop string; later tokens are dropped."""
        request = self._requests.get(message.request_id)
        if request is None:
            return
        table, tops = self._running.table, {}
        seqs = table.find_living(message.request_id)
        seqs = seqs[table.sample[seqs] == message.sample]
        sample = np.asarray([message.sample], np.int32)
        if seqs.size:
            seq = int(seqs[0])
            length = np.asarray([message.num_tokens], np.int32)
            self._admission.observe_ends(seqs, length, np.zeros(1, np.bool_))
            _, columns = self._running.log.take(seqs)
            tops = {seq: self._running.tops.pop(seq, [])[: message.num_tokens]}
            if not request.submit.stream:
                self._send_end(seqs, columns.cut(message.num_tokens), tops)
            self._results.end_seqs(seqs)
        elif not self._end_waiting(request, message):
            return
        if request.submit.stream:
            self._replies.add_ends(request, sample, Reason.STOP_STRING)
        self._results.close_samples(np.asarray([request.request_id], np.int32))

    # ---- control

    def control(self, message: Control) -> None:
        """Carry out an action, or begin to; a ControlDone follows."""
        action = message.action
        if isinstance(action, Pause):
            self._pause(message.number, action.mode)
        elif isinstance(action, RANK_ACTIONS):
            if isinstance(action, BeginUpdate):
                self._pauses.is_updating = True
            elif isinstance(action, AbandonUpdate):
                self._pauses.end_update(failed=True)
            elif isinstance(action, Sleep):
                self._running.cache.begin_epoch()
            self._orders.add(message)
        else:
            self._replies.add(ControlDone(number=message.number, count=self._act(action)))
        self._note_hold()

    def _act(self, action: AnyAction) -> int:
        """Carry out what needs no ranks; returns the count of the answer."""
        match action:
            case Resume():
                self._queue.release()
                self._replies.add_all(self._pauses.resume())
            case Abort(request_ids=ids, everything=everything):
                return self.abort(list(self._requests) if everything else as_i32(ids).tolist())
            case ResetPrefixCache():
                self._running.cache.begin_epoch()
            case CommitUpdate(version=version):
                self._running.log.change_version(version)
                self._running.cache.begin_epoch()  # what older weights computed is not for new prompts
                self._preemption.restart_prompts()
                self._pauses.end_update(failed=False)
            case SetVersion(version=version):
                self._running.log.change_version(version)
        return 0

    def _note_hold(self) -> None:
        self._holds_steps = self._pauses.holds_steps or self._orders.is_busy

    def next_order(self) -> Control | None:
        """Take an action that the ranks are to carry out now, when no step is queued on them; there may be more."""
        return None if self._in_flight else self._orders.take()

    def complete_order(self, done: ControlDone) -> None:
        answer = self._orders.complete(done)
        if answer is not None:
            self._replies.add(answer)
            self._note_hold()

    def _pause(self, number: int, mode: PauseMode) -> None:
        self._pauses.pause(number, mode)
        self._queue.release()
        match mode:
            case "abort":
                self.abort(list(self._requests))
            case "retract":
                self._preemption.retract()
            case "wait":
                self._queue.hold()

    @property
    def _is_quiet(self) -> bool:
        """No step is queued, and while requests are waited for, none has begun."""
        if self._in_flight:
            return False
        running = self._running
        has_begun = running.num_running or running.forking or self._preemption.draining or len(self._queue)
        return self._pauses.mode != "wait" or not has_begun

    def abort(self, request_ids: Iterable[int]) -> int:
        """End requests early with the tokens that they have; returns how many. Ignores unknown ids."""
        requests = [self._requests[each] for each in dict.fromkeys(request_ids) if each in self._requests]
        scored = [request for request in requests if request.scores is not None]
        for request in scored:
            self._replies.add_failure(request.request_id, "it was aborted before its prompt's log-probs were computed")
        send_aborted([request for request in requests if request.scores is None], self._running, self._replies)
        for request in requests:
            self.cancel(request.request_id)
        return len(requests)

    # ---- to and from the ranks

    def next_steps(self, now: float) -> Iterator[Step]:
        """Build the steps to queue on the ranks now; none when enough are queued or there is nothing to compute.

        Each is built when it is asked for, so that idle ranks begin while the next one is built.
        """
        depth = self._depth.depth
        while len(self._in_flight) < depth and not self._holds_steps:
            # When the ranks are about to run dry, a step of what runs goes first; admission follows with the next one.
            admit = bool(self._in_flight) or depth == 1
            built = self._builder.build(now, admit, most=depth - len(self._in_flight) if admit else 1)
            for run in self._builder.ready:
                self._finish_prompt(run.request)
            self._builder.ready = []
            if built is None:
                break
            step, records = built
            self._in_flight.extend(records)
            yield step

    def note_sent(self, now: float) -> None:
        """Note that the steps of `next_steps` are on their way to the ranks."""
        self._depth.note_sent(now, bool(self._in_flight))

    def complete(self, done: StepDone, now: float) -> None:
        record = self._in_flight.popleft()
        self._depth.note_completed(now, done.seconds, len(self._in_flight))
        assert done.step_id == record.step_id, "steps come back in order"
        self._predictor.learn(record.work, done.seconds)
        self._stats.count_step(done, record, now)
        if self._in_flight:
            self._in_flight[0].was_queued = True
        self._results.take_scores(done, record)
        for run in record.computed:
            if self._requests.get(run.request.request_id) is run.request:
                self._finish_prompt(run.request)
        # Optional work is done only while the ranks have steps queued.
        self._results.take_tokens(done, record, has_time=bool(self._in_flight))
        self._preemption.requeue_drained(record.step_id, now)
        self._running.table.complete(record.step_id)

    def note_stage_times(self, times: StageTimes) -> None:
        self._stats.stages[times.stage] = (times.seconds, times.stalled, times.waited)

    def note_expert_loads(self, loads: ExpertLoads) -> None:
        self._stats.add_loads(loads)

    def take_messages(self) -> list[ToServer]:
        """Take all that the server does not know yet, except statistics."""
        if self._pauses.is_awaited and self._is_quiet:
            self._replies.add_all(self._pauses.complete())
        return self._replies.take()

    def take_stats(self, now: float) -> Stats | None:
        """Take statistics if they are due: after the messages, which somebody waits for."""
        return self._stats.take_due(now, idle=not self._in_flight)

    @property
    def has_first_tokens(self) -> bool:
        """Whether prompts were computed of which the server has not been told."""
        return self._replies.has_prefilled

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    # ---- prompts

    def _finish_prompt(self, request: Request) -> None:
        if not request.prefilled:
            self._replies.add_prefilled(request)
            if request.is_prompt_only:
                self._replies.add_ends(request, np.arange(request.submit.n, dtype=np.int32), Reason.LENGTH)
                self._results.close_samples(np.full(request.submit.n, request.request_id, np.int32))

    # ---- ends found by the server

    def _send_end(self, seqs: Int32, columns: TokenColumns, tops: dict[int, list[Top]]) -> None:
        count, reason = np.asarray([columns.token_ids.size], np.int32), np.asarray([Reason.STOP_STRING], np.int32)
        self._replies.add_rows(seqs, count, columns, reason, tops)

    def _end_waiting(self, request: Request, message: EndSample) -> bool:
        """End a preempted sample that waits in the queue; False if it has ended already."""
        task = request.waiting.get(message.sample)
        if task is None or task.generated is None:
            return False
        self._queue.cancel(task)
        if not request.submit.stream:
            self._replies.add_waiting_end(
                request, message.sample, message.num_tokens, task.generated, Reason.STOP_STRING
            )
        return True

    def check(self) -> None:
        """Assert every invariant of the core and its parts, for tests."""
        running = self._running
        running.check()
        self._queue.check()
        if self._grouping is not None:
            self._grouping.check()
        table = running.table
        assert self._stats.num_open == sum(request.num_open for request in self._requests.values())
        living = np.flatnonzero(table.alive)
        for request_id in table.request[living].tolist():
            assert request_id in self._requests
        if not self._requests:
            assert running.cache.num_used == 0
            assert running.num_running == 0
            assert len(self._queue) == 0


def split_submits(message: Submits) -> Iterator[Submit]:
    columns = (
        as_i32(message.request_ids),
        np.cumsum(as_i32(message.lengths)),
        as_i64(message.seeds),
        as_i32(message.max_tokens),
    )
    start, prompts = 0, message.prompts
    for request_id, end, seed, max_tokens in zip(*(values.tolist() for values in columns), strict=True):
        yield Submit(
            request_id=request_id,
            prompt=prompts[4 * start : 4 * end],
            n=message.n,
            max_tokens=max_tokens,
            seed=seed,
            sampling=message.sampling,
            stream=message.stream,
            priority=message.priority,
            stop_id=message.stop_id,
            salt=message.salt,
        )
        start = end


def _make_scores(count: int, num_top: int) -> PrefillScores | None:
    if num_top < 0:
        return None
    shape = (count, num_top)
    values, ranks = np.zeros(count, np.float32), np.zeros(count, np.int32)
    return PrefillScores(values, ranks, np.zeros(shape, np.int32), np.zeros(shape, np.float32))
