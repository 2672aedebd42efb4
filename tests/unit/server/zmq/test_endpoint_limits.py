"""What a client of the endpoint may have open, and what becomes of one that takes its results slowly or not at all."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from tests.drivers.direct import Bare, bare_endpoint, ids_column, run, turns
from tests.drivers.until import until_async
from toka_async.protocol import (
    Ack,
    Bye,
    Cancellation,
    Closed,
    Columns,
    Error,
    PromptLogprobs,
    Results,
    Submission,
    Welcome,
)
from toka_async.server.engine.engine import Engine
from toka_async.server.generate.service import Service
from toka_async.server.zmq import endpoint
from toka_async.server.zmq.delivery import WINDOW
from toka_async.server.zmq.fields_cache import FieldsCache
from toka_async.server.zmq.submissions import TextBudget


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


# ---- strangers


async def test_ids_beyond_the_credit_are_refused_before_anything_is_done_for_each() -> None:
    with bare_endpoint(zmq_credit=3) as bare:
        bare.hello()
        bare.submit(1, 2, 3, 4)
        bare.say(Cancellation(columns=("ids",)), ids_column(1, 2, 3, 4))
        assert [(error.code, columns) for error, columns in bare.heard(Error)] == [("credit", {}), ("credit", {})]
        bare.submit(1, 2, 3, max_tokens=1)
        await run(bare, 3)
        assert bare.ended() == [1, 2, 3]


def nested(depth: int) -> bytes:
    return b"\x81\xa1a" + b"\x91" * depth + b"\x90"


@pytest.mark.parametrize("depth", [400, 470, 500, 600, 900])
async def test_requests_with_fields_that_nobody_can_read_end(depth: int) -> None:
    with bare_endpoint(zmq_credit=2) as bare:
        bare.hello()
        columns: Columns = {
            "ids": np.asarray([1, 2]),
            "lengths": np.asarray([1, 1], np.int32),
            "prompts": np.asarray([1, 1], np.int32),
        }
        bare.say(Submission(fields=msgspec.Raw(nested(depth)), columns=tuple(columns)), columns)
        await turns()
        ((error, named),) = bare.heard(Error)
        assert (error.status, named["ids"].tolist()) == (400, [1, 2])
        bare.submit(3, 4, ack=error.seq, max_tokens=1)
        await run(bare, 3)
        assert bare.ended() == [3, 4]


@pytest.mark.parametrize("name", ["get", "check_text", "tokenize_all", "submit", "running", "check_serving"])
@pytest.mark.parametrize("text", [False, True])
async def test_whatever_goes_wrong_requests_end_and_give_their_credit_back(
    monkeypatch: pytest.MonkeyPatch, name: str, text: bool
) -> None:
    """The class of fault that leaves requests open: an error of the program after they were admitted."""

    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    with bare_endpoint(zmq_credit=2) as bare:
        bare.hello()
        (session,) = bare.endpoint._sessions.values()
        owner = {"get": FieldsCache, "submit": Engine, "check_serving": Engine}.get(name, Service)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            if text:
                say_text(bare, 1, 2)
            else:
                bare.submit(1, 2, max_tokens=1)

            async def has_ended() -> bool:
                await run(bare, 1)
                return len(all_ended(bare)) == 2

            await until_async(has_ended)  # threads encode texts meanwhile
        assert sorted(all_ended(bare)) == [1, 2]
        seqs = [error.seq for error, _ in bare.heard(Error)] + [results.seq for results, _ in bare.heard(Results)]
        before = len(bare.ended())
        bare.submit(3, 4, ack=max(seqs), max_tokens=1)
        await run(bare, 3)
        assert bare.ended()[before:] == [3, 4]
        session.delivery.check()
        assert not session.delivery.open


def all_ended(bare: Bare) -> list[int]:
    return [key for _, columns in bare.heard(Error) for key in columns["ids"].tolist()] + bare.ended()


def say_text(bare: Bare, *ids: int) -> None:
    columns: Columns = {
        "ids": np.asarray(ids),
        "lengths": np.full(len(ids), 2, np.int32),
        "texts": np.frombuffer(b"ab" * len(ids), np.uint8),
    }
    fields = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 1}))
    bare.say(Submission(fields=fields, columns=tuple(columns)), columns)


async def test_texts_that_wait_to_be_tokenized_are_bounded() -> None:
    with bare_endpoint() as bare:
        bare.endpoint._texts = TextBudget(5)
        bare.hello()
        say_text(bare, 1, 2)
        say_text(bare, 3, 4)
        await turns()
        ((error, columns),) = bare.heard(Error)
        assert (error.code, error.retry_after, columns["ids"].tolist()) == ("overloaded", 1, [3, 4])
        (session,) = bare.endpoint._sessions.values()
        await asyncio.gather(*session._encoders)
        say_text(bare, 3, 4)
        await turns()
        assert len(bare.heard(Error)) == 1


def say_hello(bare: Bare, sender: str, number: int) -> bool:
    """Whether a session of that key's has begun."""
    bare.wire.sender = sender
    identity = f"{sender} {number}".encode()
    bare.hello(session=identity.ljust(16), identity=identity)
    return bool(bare.heard(Welcome, identity))


async def test_a_key_has_no_more_sessions_than_are_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_SESSIONS", 16)
    with bare_endpoint() as bare:
        got = [sum(say_hello(bare, key, number) for number in range(20)) for key in ("greedy", "second", "third")]
        assert got == [8, 4, 2]
        assert say_hello(bare, "late", 0)


async def test_without_keys_all_sessions_are_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_SESSIONS", 16)
    with bare_endpoint() as bare:
        assert sum(say_hello(bare, "", number) for number in range(20)) == 16


async def test_what_is_kept_for_all_clients_together_is_bounded() -> None:
    """Who has most loses what was acknowledged, and then is cut off."""
    with bare_endpoint() as bare:
        for number in range(3):
            assert say_hello(bare, "", number)
            bare.submit(1, max_tokens=400, stream=True, n=1 + 3 * number, identity=f" {number}".encode())
        await run(bare, 300)
        kept = [session.num_bytes for session in bare.endpoint._sessions.values()]
        assert kept == sorted(kept)
        bare.endpoint._most_kept = sum(kept)
        await run(bare, 10)
        assert [bool(bare.heard(Closed, f" {number}".encode())) for number in range(3)] == [False, False, True]
        assert bare.endpoint.num_sessions == 2


async def test_a_connection_whose_session_has_moved_is_ended(bare: Bare) -> None:
    bare.hello()
    assert bare.wire.kept == {b"one"}
    bare.hello()
    assert not bare.wire.gone
    bare.hello(identity=b"two")
    assert bare.wire.gone == {b"one"}
    assert bare.wire.kept == {b"two"}
    bare.say(Bye(), identity=b"two")
    assert not bare.wire.kept
