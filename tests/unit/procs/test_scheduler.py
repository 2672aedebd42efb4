from __future__ import annotations

from typing import TypeVar, cast

import msgspec
import pytest

from tests.drivers.page_rank import PageRank, submit
from toka_async.arrays import as_i32, i32_column
from toka_async.config import load_config
from toka_async.messages import (
    FromRank,
    Prefills,
    RankDevice,
    Ready,
    Reason,
    Stats,
    Step,
    StepDone,
    Submits,
    Tokens,
    TokenSampling,
    ToRank,
    ToScheduler,
    ToServer,
)
from toka_async.procs.scheduler import make_core, make_step_limits, run_turn, wait_ready
from toka_async.procs.step_times import StepTimes
from toka_async.scheduler.core import Core
from toka_async.scheduler.step_budget import UNLIMITED
from toka_async.transport.codec import Codec
from toka_async.transport.local import LocalChannel
from toka_async.transport.zmq_sockets import ZmqInbox

S = TypeVar("S")


def test_a_request_goes_through() -> None:
    ready = Ready(num_pages=8, page_size=4, max_seqs=2, max_context=16, vocab_size=10, max_tokens=8)
    core = Core(ready, max_tokens=ready.max_tokens, steps_ahead=1)
    requests: LocalChannel[ToScheduler] = LocalChannel(Codec(ToScheduler))
    results: LocalChannel[FromRank] = LocalChannel(Codec(FromRank))
    server: LocalChannel[ToServer] = LocalChannel(Codec(ToServer))
    ranks: LocalChannel[ToRank] = LocalChannel(Codec(ToRank))
    times = StepTimes()

    run_turn(core, requests, results, server, ranks, times, ready)
    assert ranks.drain() == []

    requests.send(
        Submits(
            request_ids=i32_column([7]),
            lengths=i32_column([3]),
            prompts=i32_column([1, 2, 3]),
            seeds=memoryview(bytes(8)),
            max_tokens=i32_column([1]),
            sampling=TokenSampling(),
        )
    )
    run_turn(core, requests, results, server, ranks, times, ready)
    (step,) = ranks.drain()
    assert isinstance(step, Step)
    assert as_i32(step.prompts[0].token_ids).tolist() == [1, 2, 3]
    assert not [message for message in server.drain() if isinstance(message, Tokens)]

    results.send(StepDone(step_id=step.step_id, token_ids=i32_column([5])))
    run_turn(core, requests, results, server, ranks, times, ready)
    answered = server.drain()
    (prefilled,) = [message for message in answered if isinstance(message, Prefills)]
    (tokens,) = [message for message in answered if isinstance(message, Tokens)]
    assert answered[-1:] == [message for message in answered if isinstance(message, Stats)]  # nobody waits for these
    assert as_i32(prefilled.request_ids).tolist() == [7]
    assert as_i32(tokens.request_ids).tolist() == [7]
    assert as_i32(tokens.token_ids).tolist() == [5]
    assert as_i32(tokens.reasons).tolist() == [Reason.LENGTH]


class Noted(LocalChannel[S]):
    """Notes what is sent in a list that channels share."""

    def __init__(self, union: object, sent: list[type]) -> None:
        super().__init__(Codec(union))
        self._sent = sent

    def send(self, message: S) -> None:
        self._sent.append(type(message))
        super().send(message)


def test_first_tokens_go_before_the_next_steps_while_ranks_have_one() -> None:
    ready = Ready(num_pages=8, page_size=4, max_seqs=2, max_context=16, vocab_size=10, max_tokens=8)
    core, rank, sent = Core(ready, max_tokens=ready.max_tokens, steps_ahead=2), PageRank(ready), list[type]()
    requests: LocalChannel[ToScheduler] = LocalChannel(Codec(ToScheduler))
    results: LocalChannel[FromRank] = LocalChannel(Codec(FromRank))
    server: Noted[ToServer] = Noted(ToServer, sent)
    ranks: Noted[ToRank] = Noted(ToRank, sent)

    def turn() -> list[type]:
        sent.clear()
        run_turn(core, requests, results, server, ranks, StepTimes(), ready)
        return [kind for kind in sent if kind is not Stats]

    core.submit(submit(0, [1, 2, 3], max_tokens=6, stream=True), 0.0)
    assert turn() == [Step, Step]
    for step in ranks.drain():
        assert isinstance(step, Step)
        for part in step.passes():
            results.send(rank.run(part))
            assert turn() == ([Prefills, Tokens, Step] if step.step_id == 0 else [Step, Tokens])


class Waiting:
    """An inbox of messages that have arrived."""

    def __init__(self, *messages: FromRank) -> None:
        self.messages = [*messages]

    def receive(self) -> FromRank:
        return self.messages.pop(0)


def test_all_ranks_of_a_replica_are_waited_for_and_agree() -> None:
    ready = Ready(num_pages=8, page_size=4, max_seqs=2, max_context=16, vocab_size=10, max_tokens=8)
    more = msgspec.structs.replace(ready, num_pages=9)
    inbox = Waiting(ready, ready, ready, more)
    assert wait_ready(cast(ZmqInbox[FromRank], inbox), 3) == ready
    assert inbox.messages == [more]
    with pytest.raises(AssertionError, match="num_pages=9"):
        wait_ready(cast(ZmqInbox[FromRank], Waiting(ready, more)), 2)


def test_each_rank_tells_of_its_own_device() -> None:
    ready = Ready(num_pages=8, page_size=4, max_seqs=2, max_context=16, vocab_size=10, max_tokens=8)
    ranks = [RankDevice(rank=rank, device="cpu", dtype="float32", weights=10 + rank) for rank in range(3)]
    inbox = Waiting(*(msgspec.structs.replace(ready, ranks=(ranks[rank],)) for rank in (2, 0, 1)))
    assert wait_ready(cast(ZmqInbox[FromRank], inbox), 3) == msgspec.structs.replace(ready, ranks=tuple(ranks))


@pytest.mark.parametrize(
    ("value", "seconds", "streaming"),
    [("auto", 0.125, 0.04), ("0", UNLIMITED, UNLIMITED), ("70.5", 0.0705, 0.0705)],
)
def test_limits_of_a_steps_time(value: str, seconds: float, streaming: float) -> None:
    limits = make_step_limits(load_config(None, [f"schedule.max_step_ms={value}"]).schedule)
    assert (limits.seconds, limits.streaming) == pytest.approx((seconds, streaming))


@pytest.mark.parametrize(
    ("of_rank", "overrides", "grouped"),
    [
        ((0, 0), [], False),
        ((3, 8), [], True),
        ((4, 8), [], False),
        ((3, 12), [], False),
        ((3, 8), ["schedule.group_min_seqs=0"], False),
        ((3, 8), ["schedule.group_min_tokens=12"], False),
        ((0, 0), ["schedule.group_min_seqs=3"], True),
        ((9, 99), ["schedule.group_min_seqs=3", "schedule.group_min_tokens=8"], True),
    ],
)
def test_groups_are_as_small_as_the_rank_or_the_user_says(
    of_rank: tuple[int, int], overrides: list[str], grouped: bool
) -> None:
    """Three samples that share two pages of four tokens."""
    ready = Ready(
        num_pages=32,
        page_size=4,
        max_seqs=4,
        max_context=64,
        vocab_size=23,
        max_tokens=32,
        group_min_seqs=of_rank[0],
        group_min_tokens=of_rank[1],
    )
    core, rank = make_core(ready, load_config(None, overrides)), PageRank(ready)
    core.submit(submit(0, list(range(11)), n=3, max_tokens=5), 0.0)
    while steps := list(core.next_steps(0.0)):
        for done in [rank.run(part) for step in steps for part in step.passes()]:
            core.complete(done, 0.0)
    assert (rank.num_grouped > 0) == grouped
