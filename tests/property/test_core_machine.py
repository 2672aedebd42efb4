"""The core under any order of submits, cancels, found stop strings and completions, against a page-level rank."""

from __future__ import annotations

from typing import Unpack

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.drivers.core import CoreDriver, CoreOptions, Received
from tests.drivers.page_rank import PageRank, expected, prompt_score, submit
from toka_async.arrays import as_f32, as_i32, i32_column
from toka_async.control import (
    AbandonUpdate,
    Abort,
    AnyAction,
    BeginUpdate,
    Checksum,
    CommitUpdate,
    Control,
    ControlDone,
    Directory,
    LoadTensors,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Sleep,
    VerifyUpdate,
    Wake,
)
from toka_async.messages import Ready, Reason, Step, StepDone, TokenSampling
from toka_async.scheduler.cache.window_pool import count_least_pages
from toka_async.scheduler.step_budget import StepLimits

VOCAB = 23
TOKEN = 1e-3  # seconds of a token
ENDS = [3, 4]


class TimedPageRank(PageRank):
    """A step takes so long for each of its tokens, and nothing else."""

    def run(self, step: Step) -> StepDone:
        before = self.num_computed
        done = super().run(step)
        return msgspec.structs.replace(done, seconds=TOKEN * (self.num_computed - before))


class CoreMachine(RuleBasedStateMachine):
    """Small caches, so that eviction and preemption are the rule."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 5]),
        num_tokens=st.integers(24, 90),
        max_seqs=st.integers(1, 8),
        extra_tokens=st.integers(0, 12),
        steps_ahead=st.integers(1, 4),
        prefix=st.booleans(),
        until_full=st.booleans(),
        group_min_seqs=st.sampled_from([0, 2, 2, 3]),
        group_min_tokens=st.integers(1, 7),
        beside=st.sampled_from(["snapshots", "windows", "nothing"]),
        num_snapshots=st.sampled_from([1, 2, 5]),
        window=st.sampled_from([1, 2, 3, 6, 11]),
        extra_window_pages=st.integers(0, 12),
        step_limits=st.sampled_from([StepLimits(), StepLimits(9 * TOKEN, 4 * TOKEN, least_tokens=1)]),
    )
    def start(
        self,
        page_size: int,
        num_tokens: int,
        max_seqs: int,
        extra_tokens: int,
        until_full: bool,
        beside: str,
        num_snapshots: int,
        window: int,
        extra_window_pages: int,
        **options: Unpack[CoreOptions],
    ) -> None:
        num_pages, has_windows = num_tokens // page_size, beside == "windows"
        num_window_pages = min(num_pages, count_least_pages(window, page_size) + extra_window_pages)
        ready = Ready(
            num_pages=num_pages,
            page_size=page_size,
            max_seqs=max_seqs,
            max_context=64,
            vocab_size=VOCAB,
            token_seconds=TOKEN,
            num_snapshots=num_snapshots if beside == "snapshots" else 0,
            num_window_pages=num_window_pages if has_windows else 0,
            window=window if has_windows else 0,
        )
        self.ready = ready
        rank = TimedPageRank(ready)
        self.driver = CoreDriver(ready, max_tokens=max_seqs + extra_tokens, rank=rank, until_full=until_full, **options)
        self.rank = rank
        self.driver.carry_out = self.carry_out
        self.orders: list[int] = []
        self.is_updating = self.is_torn = self.is_asleep = False
        self.ends_asked: dict[tuple[int, int], int] = {}
        self.aborted: set[int] = set()
        self.pauses: list[int] = []

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=14),
        n=st.sampled_from([1, 1, 1, 2, 3, 9]),
        max_tokens=st.sampled_from([0, 1, 2, 3, 7, 12]),
        stream=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
        num_logprobs=st.sampled_from([-1, -1, 0, 2]),
        num_prompt_logprobs=st.sampled_from([-1, -1, 0, 1]),
        salt=st.sampled_from([0, 0, 3]),
    )
    def submit(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int,
        stream: bool,
        priority: int,
        num_logprobs: int,
        num_prompt_logprobs: int,
        salt: int,
    ) -> None:
        sampling = TokenSampling(
            end_ids=i32_column(ENDS), num_logprobs=num_logprobs, num_prompt_logprobs=num_prompt_logprobs
        )
        fields = {"n": n, "max_tokens": max_tokens, "stream": stream, "priority": priority, "sampling": sampling}
        self.driver.submit(submit(len(self.driver.received), prompt, salt=salt, **fields))

    @rule(firsts=st.lists(st.integers(0, 1), min_size=3, max_size=8), max_tokens=st.integers(3, 12))
    def submit_several(self, firsts: list[int], max_tokens: int) -> None:
        """Prompts that begin alike, in any order: their rows take a new order to be together."""
        sampling = TokenSampling(end_ids=i32_column(ENDS))
        for i, first in enumerate(firsts):
            fields = {"max_tokens": max_tokens, "sampling": sampling}
            self.driver.submit(submit(len(self.driver.received), [*(7 * [first]), i % 3], **fields))

    @rule(
        prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=6),
        n=st.sampled_from([1, 1, 2]),
        max_tokens=st.integers(1, 9),
        salt=st.sampled_from([0, 3]),
    )
    def submit_columns(self, prompts: list[list[int]], n: int, max_tokens: int, salt: int) -> None:
        """Many in one message."""
        fields = {"n": n, "max_tokens": max_tokens, "salt": salt, "sampling": TokenSampling(end_ids=i32_column(ENDS))}
        first = len(self.driver.received)
        self.driver.submit_all([submit(first + i, prompt, **fields) for i, prompt in enumerate(prompts)])

    @rule(data=st.data(), count=st.integers(1, 5))
    @precondition(lambda self: self.open_ids())
    def cancel_several(self, data: st.DataObject, count: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.open_ids()), max_size=count, unique=True))
        self.driver.cancel_all(chosen)

    @rule(data=st.data())
    @precondition(lambda self: self.open_ids())
    def cancel(self, data: st.DataObject) -> None:
        self.driver.cancel(data.draw(st.sampled_from(self.open_ids())))

    @rule(data=st.data())
    @precondition(lambda self: self.open_ids())
    def find_stop_string(self, data: st.DataObject) -> None:
        """The server ends a sample after a token that it has seen, as it does for streamed requests."""
        request_id = data.draw(st.sampled_from(self.open_ids()))
        received = self.driver.received[request_id]
        seen = [(i, s) for i, s in enumerate(received.samples) if s.reason == Reason.NONE and s.token_ids]
        if seen:
            index, sample = data.draw(st.sampled_from(seen))
            count = data.draw(st.integers(1, len(sample.token_ids)))
            self.ends_asked[request_id, index] = count
            self.driver.end(request_id, index, count)
            assert sample.reason == Reason.STOP_STRING

    @rule(mode=st.sampled_from(["abort", "wait", "keep", "retract"]))
    @precondition(lambda self: not (self.is_torn or self.is_asleep))
    def pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            self.aborted.update(self.open_ids())
        self.pauses.append(self.driver.control(Pause(mode=mode)))
        assert mode != "abort" or not self.driver.core.num_requests

    def carry_out(self, order: Control) -> ControlDone:
        """What the rank does: its weights change as they are loaded, and what sleeps forgets."""
        if isinstance(order.action, LoadTensors):
            self.rank.weights += 1
        if isinstance(order.action, Sleep):
            self.rank.pages[:] = -1
            self.rank.snapshots.clear()
        return ControlDone(number=order.number)

    def order(self, action: AnyAction) -> None:
        """As the server does: one after the other, each waited for."""
        number = self.driver.control(action)
        self.driver.obey()
        while number not in self.driver.done:
            self.driver.complete()
            self.driver.obey()

    @rule()
    @precondition(lambda self: not (self.is_updating or self.is_asleep))
    def begin_update(self) -> None:
        self.order(BeginUpdate())
        self.is_updating = True

    @rule()
    @precondition(lambda self: self.is_updating)
    def load_tensors(self) -> None:
        self.order(LoadTensors(source=Directory(path="/"), seconds=1.0))
        self.is_torn = True

    @rule()
    @precondition(lambda self: self.is_updating)
    def abandon_update(self) -> None:
        self.order(AbandonUpdate())
        self.is_updating = False
        assert not self.driver.turn()

    @rule()
    @precondition(lambda self: self.is_updating and self.is_torn)
    def commit_update(self) -> None:
        self.order(VerifyUpdate())
        self.order(CommitUpdate(version="new"))
        self.is_updating = self.is_torn = False

    @rule()
    def sum_up(self) -> None:
        self.order(Checksum())

    @rule(mode=st.sampled_from(["abort", "retract"]))
    @precondition(lambda self: not (self.is_updating or self.is_asleep))
    def sleep(self, mode: PauseMode) -> None:
        self.pause(mode)
        self.order(Sleep())
        self.is_asleep = True

    @rule()
    @precondition(lambda self: self.is_asleep)
    def wake(self) -> None:
        self.order(Wake())
        self.is_asleep = False

    @rule()
    @precondition(lambda self: not (self.is_updating or self.is_torn or self.is_asleep))
    def resume(self) -> None:
        number = self.driver.control(Resume())
        assert not self.driver.done[number].error
        assert set(self.pauses) <= self.driver.done.keys()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.driver.control(ResetPrefixCache())

    @rule(data=st.data(), count=st.integers(1, 5))
    @precondition(lambda self: self.open_ids())
    def abort(self, data: st.DataObject, count: int) -> None:
        open_ids = self.open_ids()
        chosen = data.draw(st.lists(st.sampled_from(open_ids), max_size=count, unique=True))
        number = self.driver.control(Abort(request_ids=i32_column(chosen)))
        self.aborted.update(chosen)
        assert self.driver.done[number].count == len(chosen)
        assert all(self.driver.received[each].ended for each in chosen)

    @rule()
    def build(self) -> None:
        self.driver.build()

    @rule()
    @precondition(lambda self: self.driver.queued)
    def complete(self) -> None:
        self.driver.complete()

    @rule(turns=st.integers(1, 12))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.driver.turn()
            self.driver.core.check()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "driver"):
            self.driver.core.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.end_update()
            self.settle()
            self.driver.control(Resume())
            self.driver.drain()
            assert set(self.pauses) <= self.driver.done.keys()
            for request_id, received in self.driver.received.items():
                if request_id not in self.driver.cancelled:
                    self.verify(request_id, received)

    def end_update(self) -> None:
        """So that the engine may go on."""
        if self.is_asleep:
            self.wake()
        if self.is_torn and not self.is_updating:
            self.begin_update()
        if self.is_updating:
            self.load_tensors()
            self.commit_update()

    def settle(self) -> None:
        """A pause is complete once the steps that were queued have come back, and nothing is built any more."""
        while self.driver.turn():
            pass
        assert set(self.pauses) <= self.driver.done.keys()

    def open_ids(self) -> list[int]:
        driver = self.driver
        return [i for i, received in driver.received.items() if not received.ended and i not in driver.cancelled]

    def verify(self, request_id: int, received: Received) -> None:
        """Every request ended exactly once, with the tokens that a rank without pages would give."""
        message, ready = received.submit, self.ready
        prompt = as_i32(message.prompt)
        total = prompt.size + message.max_tokens
        pages = -(-total // ready.page_size) + (message.n > 1)
        is_scored = request_id in self.aborted and message.sampling.num_prompt_logprobs >= 0
        if not (is_scored and received.failed):
            assert (received.failed is not None) == (pages > ready.num_pages or total > ready.max_context)
        if received.failed is not None:
            return
        assert received.prefilled is not None or request_id in self.aborted
        if received.prefilled is not None and message.sampling.num_prompt_logprobs >= 0:
            scores = [prompt_score(prompt, i) for i in range(1, prompt.size)]
            assert as_f32(received.prefilled.logprobs).tolist() == scores
            assert as_i32(received.prefilled.ranks).tolist() == (prompt[1:] + 1).tolist()
            assert len(as_i32(received.prefilled.top_ids)) == len(scores) * message.sampling.num_prompt_logprobs
        for index, sample in enumerate(received.samples):
            tokens = expected(prompt, message.seed, index, message.max_tokens, set(ENDS), VOCAB)
            asked = self.ends_asked.get((request_id, index))
            if sample.reason == Reason.ABORT:
                assert request_id in self.aborted
                assert sample.token_ids == tokens[: len(sample.token_ids)]
                assert len(sample.logprobs) == (len(sample.token_ids) if message.sampling.num_logprobs >= 0 else 0)
                assert message.stream or sample.num_rows == 1
                continue
            if sample.reason == Reason.STOP_STRING:
                assert asked is not None
                assert sample.token_ids[:asked] == tokens[:asked]
                assert message.stream or len(sample.token_ids) == asked
                continue
            assert sample.token_ids == tokens
            assert sample.reason == (Reason.STOP if tokens and tokens[-1] in ENDS else Reason.LENGTH)
            assert message.stream or sample.num_rows == 1
            if message.sampling.num_logprobs >= 0:
                assert len(sample.logprobs) == len(tokens)
            if message.sampling.num_logprobs > 0:
                assert [top[0] for top in sample.top_ids] == tokens


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
