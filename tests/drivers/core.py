"""Drives a core with a simulated rank and keeps what a server would: for tests. Knows messages only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypedDict, Unpack

import numpy as np

from tests.drivers.page_rank import PageRank
from toka_async.arrays import as_f32, as_i32, column, i32_column
from toka_async.control import AnyAction, Control, ControlDone
from toka_async.messages import (
    Cancels,
    EndSample,
    Failed,
    Prefilled,
    Prefills,
    Ready,
    Reason,
    Stats,
    Step,
    StepDone,
    StopChecks,
    Submit,
    Submits,
    Tokens,
    ToRank,
    ToServer,
)
from toka_async.scheduler.admission.lookahead import LookAhead
from toka_async.scheduler.admission.policy import UntilFull
from toka_async.scheduler.core import Core
from toka_async.scheduler.step_budget import StepLimits
from toka_async.transport.codec import Codec


@dataclass(slots=True)
class Sample:
    """What arrived of one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # of the weights, for each token
    reason: Reason = Reason.NONE
    num_rows: int = 0


@dataclass(slots=True)
class Received:
    """What arrived of one request."""

    submit: Submit
    samples: list[Sample]
    prefilled: Prefilled | None = None
    failed: str | None = None

    @property
    def ended(self) -> bool:
        return self.failed is not None or all(sample.reason != Reason.NONE for sample in self.samples)


class Rank(Protocol):
    """What runs steps: a simulated rank, or a real runner."""

    def run(self, step: Step) -> StepDone: ...


class CoreOptions(TypedDict, total=False):
    step_limits: StepLimits
    steps_ahead: int
    prefix: bool
    group_min_seqs: int
    group_min_tokens: int


class CoreDriver:
    """A core, a rank (without a model unless given) that runs its steps when told to, and everything received."""

    def __init__(
        self,
        ready: Ready,
        *,
        max_tokens: int,
        rank: Rank | None = None,
        until_full: bool = False,
        **options: Unpack[CoreOptions],
    ) -> None:
        """`until_full` admits while pages are free, so that preemption is common."""
        admission = UntilFull if until_full else LookAhead
        self.core = Core(ready, max_tokens=max_tokens, admission=admission, **options)
        self.rank: Rank = rank or PageRank(ready)
        self.queued: deque[Step] = deque()
        self.received: dict[int, Received] = {}
        self.cancelled: set[int] = set()
        self.stop_checks: list[tuple[int, int, int, list[int]]] = []
        self.stats = Stats()
        self.step_sizes: list[int] = []
        self.done: dict[int, ControlDone] = {}
        self.num_controls = 0
        self.carry_out: Callable[[Control], ControlDone] = lambda order: ControlDone(number=order.number)
        self._codec: Codec[ToRank] = Codec(ToRank)

    def submit(self, message: Submit) -> Received:
        samples = [Sample() for _ in range(message.n)]
        received = self.received[message.request_id] = Received(message, samples)
        self.core.submit(message, 0.0)
        self.collect()
        return received

    def submit_all(self, messages: list[Submit]) -> None:
        """As one message of columns; they differ in id, prompt, seed and max_tokens only."""
        for message in messages:
            self.received[message.request_id] = Received(message, [Sample() for _ in range(message.n)])
        like = messages[0]
        prompts = [as_i32(message.prompt) for message in messages]
        self.core.receive(
            Submits(
                request_ids=i32_column([message.request_id for message in messages]),
                lengths=i32_column([prompt.size for prompt in prompts]),
                prompts=column(np.concatenate(prompts)),
                seeds=column(np.asarray([message.seed for message in messages], np.int64)),
                n=like.n,
                max_tokens=i32_column([message.max_tokens for message in messages]),
                sampling=like.sampling,
                stream=like.stream,
                priority=like.priority,
                salt=like.salt,
            ),
            0.0,
        )
        self.collect()

    def cancel_all(self, request_ids: list[int]) -> None:
        self.cancelled.update(request_ids)
        self.core.receive(Cancels(request_ids=i32_column(request_ids)), 0.0)
        self.collect()

    def cancel(self, request_id: int) -> None:
        self.cancelled.add(request_id)
        self.core.cancel(request_id)
        self.collect()

    def end(self, request_id: int, sample: int, num_tokens: int) -> None:
        self.core.end_sample(EndSample(request_id=request_id, sample=sample, num_tokens=num_tokens))
        self.collect()

    def control(self, action: AnyAction) -> int:
        """Returns the number under which `done` has the answer, now or later."""
        self.num_controls += 1
        self.core.receive(Control(number=self.num_controls, action=action), 0.0)
        self.collect()
        return self.num_controls

    def obey(self) -> None:
        """The rank carries out what it is told between steps."""
        while (order := self.core.next_order()) is not None:
            message = self._codec.decode(self._codec.encode(order))
            assert isinstance(message, Control)
            assert not self.queued, "an order comes between steps"
            self.core.complete_order(self.carry_out(message))
            self.collect()

    def build(self) -> None:
        """Queue the steps that the core wants queued, as bytes."""
        for step in self.core.next_steps(0.0):
            data = self._codec.encode(step)
            self.step_sizes.append(len(data))
            message = self._codec.decode(data)
            assert isinstance(message, Step)
            self.queued.extend(message.passes())
        self.obey()
        self.collect()

    def complete(self) -> None:
        """The rank runs the oldest queued step."""
        self.core.complete(self.rank.run(self.queued.popleft()), 0.0)
        self.collect()

    def turn(self) -> bool:
        """Build, then complete one step; False when there was nothing to do."""
        self.build()
        if not self.queued:
            return False
        self.complete()
        return True

    def drain(self, max_turns: int = 100_000) -> None:
        """Run until nothing is left; every request must have ended."""
        for _ in range(max_turns):
            if not self.turn():
                break
            self.core.check()
        self.core.check()
        assert self.core.num_requests == 0, "work is left that nothing moves"

    def collect(self) -> None:
        for message in self.core.take_messages():
            self._take(message)
        self.stats = self.core.take_stats(0.0) or self.stats

    def _take(self, message: ToServer) -> None:
        match message:
            case Tokens():
                self._take_tokens(message)
            case Prefilled():
                assert message.request_id not in self.cancelled
                received = self.received[message.request_id]
                assert received.prefilled is None
                received.prefilled = message
            case Prefills():
                for request_id, cached in zip(as_i32(message.request_ids), as_i32(message.cached_tokens), strict=True):
                    self._take(Prefilled(request_id=int(request_id), cached_tokens=int(cached)))
            case Failed():
                self.received[message.request_id].failed = message.message
            case StopChecks():
                cuts = np.cumsum(as_i32(message.counts))[:-1]
                windows = np.split(as_i32(message.token_ids), cuts)
                columns = (as_i32(c).tolist() for c in (message.request_ids, message.samples, message.num_tokens))
                for request, sample, count, window in zip(*columns, windows, strict=True):
                    self.stop_checks.append((request, sample, count, window.tolist()))
            case ControlDone():
                assert message.number not in self.done
                self.done[message.number] = message

    def _take_tokens(self, message: Tokens) -> None:
        counts = as_i32(message.counts)
        ids, logprobs = as_i32(message.token_ids), as_f32(message.logprobs)
        tops = as_i32(message.top_ids).reshape(ids.size, -1) if message.num_logprobs > 0 and ids.size else None
        at = 0
        rows = zip(as_i32(message.request_ids), as_i32(message.samples), as_i32(message.reasons), counts, strict=True)
        spans: dict[int, list[tuple[int, int]]] = {}
        for row, end, number in as_i32(message.spans).reshape(-1, 3).tolist():
            spans.setdefault(row, []).append((end, number))
        for row, (request_id, index, reason, count) in enumerate(rows):
            versions: list[str] = []
            for end, number in [*spans.get(row, ()), (int(count), 0)]:
                assert end <= count
                versions += [message.versions[number]] * (end - len(versions))
            assert int(request_id) not in self.cancelled
            sample = self.received[int(request_id)].samples[int(index)]
            assert sample.reason == Reason.NONE, "a sample ends once"
            sample.token_ids += ids[at : at + count].tolist()
            sample.versions += versions
            sample.kept += as_i32(message.kept)[at : at + count].tolist()
            if message.num_logprobs >= 0:
                sample.logprobs += logprobs[at : at + count].tolist()
            if tops is not None:
                sample.top_ids += tops[at : at + count].tolist()
            sample.reason = Reason(int(reason))
            sample.num_rows += 1
            at += count
        assert at == ids.size
