"""The scheduler's loop, over channels within the process."""

from __future__ import annotations

from toka_async.arrays import as_i32, i32_column
from toka_async.messages import (
    FromRank,
    Prefilled,
    Ready,
    Reason,
    Sampling,
    StepDone,
    Submit,
    Tokens,
    ToRank,
    ToScheduler,
    ToServer,
)
from toka_async.procs.scheduler import turn
from toka_async.procs.step_times import StepTimes
from toka_async.scheduler.core import Core
from toka_async.transport.codec import Codec
from toka_async.transport.local import LocalChannel


def test_a_request_goes_through() -> None:
    ready = Ready(num_pages=8, page_size=4, max_seqs=2, max_context=16, vocab_size=10, max_tokens=8)
    core = Core(ready, max_tokens=ready.max_tokens, steps_ahead=1)
    requests: LocalChannel[ToScheduler] = LocalChannel(Codec(ToScheduler))
    results: LocalChannel[FromRank] = LocalChannel(Codec(FromRank))
    server: LocalChannel[ToServer] = LocalChannel(Codec(ToServer))
    ranks: LocalChannel[ToRank] = LocalChannel(Codec(ToRank))
    times = StepTimes()

    turn(core, requests, results, server, ranks, times)
    assert ranks.drain() == []

    prompt = i32_column([1, 2, 3])
    requests.send(Submit(request_id=7, prompt=prompt, max_tokens=1, seed=0, sampling=Sampling()))
    turn(core, requests, results, server, ranks, times)
    (step,) = ranks.drain()
    assert as_i32(step.prompts[0].token_ids).tolist() == [1, 2, 3]
    assert not [message for message in server.drain() if isinstance(message, Tokens)]

    results.send(StepDone(step_id=step.step_id, token_ids=i32_column([5])))
    turn(core, requests, results, server, ranks, times)
    answered = server.drain()
    (prefilled,) = [message for message in answered if isinstance(message, Prefilled)]
    (tokens,) = [message for message in answered if isinstance(message, Tokens)]
    assert prefilled.request_id == 7
    assert as_i32(tokens.request_ids).tolist() == [7]
    assert as_i32(tokens.token_ids).tolist() == [5]
    assert as_i32(tokens.reasons).tolist() == [Reason.LENGTH]
