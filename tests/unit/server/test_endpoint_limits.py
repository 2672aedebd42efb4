"""What a client of the endpoint may have open, and what becomes of one that takes its results slowly or not at all."""

from __future__ import annotations

import numpy as np

from tests.direct import Bare, bare_endpoint, ids_column, run, turns
from toka_async.protocol import (
    Ack,
    Cancellation,
    Closed,
    Error,
    PromptLogprobs,
    Results,
    Welcome,
)
from toka_async.server.delivery import WINDOW


async def test_more_than_the_credit_is_refused_and_does_not_count() -> None:
    with bare_endpoint(zmq_credit=3) as bare:
        bare.hello()
        bare.submit(1, 2, max_tokens=2)
        bare.submit(3, 4, max_tokens=2)
        ((error, columns),) = bare.heard(Error)
        assert (error.code, error.status, columns["ids"].tolist()) == ("credit", 429, [3, 4])
        await run(bare, 3)
        bare.submit(3, 4, max_tokens=2, ack=1)
        await run(bare, 3)
        assert bare.ended() == [1, 2, 3, 4]


async def test_too_much_for_the_engine_is_refused_with_a_time_to_retry() -> None:
    with bare_endpoint(max_requests=2) as bare:
        bare.hello()
        bare.submit(1, 2, 3)
        bare.submit(4, 5, 6, text=True)
        await turns()
        ((error, columns),) = bare.heard(Error)
        assert (error.code, error.status, error.retry_after) == ("overloaded", 429, 1)
        assert columns["ids"].tolist() == [3, 4, 5, 6]
        assert bare.service.engine.num_requests == 2
        await run(bare, 17)
        bare.submit(3, 4)
        assert bare.service.engine.num_requests == 0, "its refusal is not acknowledged yet"
        bare.submit(3, 4, ack=1)
        assert bare.service.engine.num_requests == 2


async def test_a_slow_client_gets_a_window_of_messages_and_then_all_that_came_as_one(bare: Bare) -> None:
    bare.hello()
    bare.submit(1, max_tokens=100, stream=True)
    await run(bare, 101)
    assert len(bare.heard(Results)) == WINDOW
    bare.say(Ack(ack=1))
    await turns()
    assert len(bare.heard(Results)) == WINDOW + 1
    _, columns = bare.heard(Results)[-1]
    assert columns["ids"].size == 100 - WINDOW
    assert bare.ended() == [1]


def told(bare: Bare) -> list[tuple[str, int]]:
    """What was said of which request, in order."""
    return [
        (type(header).__name__, header.id if isinstance(header, PromptLogprobs) else key)
        for header, columns in bare.wire.sent[b"one"]
        for key in ([0] if isinstance(header, PromptLogprobs) else columns.get("ids", np.empty(0)).tolist())
    ]


async def test_log_probs_of_prompts_come_first_and_in_the_window(bare: Bare) -> None:
    bare.hello()
    bare.submit(*range(80), max_tokens=2, prompt_logprobs=1)
    await run(bare, 10)
    assert len(bare.heard(PromptLogprobs)) + len(bare.heard(Results)) == WINDOW, "no more are under way"
    for _ in range(5):
        bare.say(Ack(ack=len(bare.heard(PromptLogprobs)) + len(bare.heard(Results))))
        await turns()
    said = told(bare)
    assert sorted(bare.ended()) == list(range(80))
    assert all(said.index(("PromptLogprobs", key)) < said.index(("Results", key)) for key in range(80))


async def test_nothing_comes_of_a_request_after_its_error(bare: Bare) -> None:
    bare.hello()
    bare.submit(1, 2, max_tokens=400, stream=True)
    while len(bare.heard(Results)) < WINDOW:
        await run(bare, 1)
    bare.say(Cancellation(columns=("ids",)), ids_column(1))
    await run(bare, 3)
    bare.say(Cancellation(columns=("ids",)), ids_column(2))
    await run(bare, 3)
    bare.say(Ack(ack=WINDOW))
    await turns()
    said = told(bare)
    assert ("Results", 2) not in said[said.index(("Error", 2)) :]


async def test_a_client_that_takes_nothing_is_cut_off(bare: Bare) -> None:
    bare.hello()
    (session,) = bare.endpoint._sessions.values()
    session.most_bytes = 20_000
    bare.submit(1, max_tokens=400, stream=True, n=4)
    await run(bare, 300)
    assert [closed.code for closed, _ in bare.heard(Closed)] == ["too_slow"]
    assert bare.service.engine.num_requests == 0
    assert bare.endpoint.num_sessions == 0
    bare.hello()
    assert not bare.heard(Welcome)[-1][0].resumed
