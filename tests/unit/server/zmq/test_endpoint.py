"""The endpoint of direct submission without sockets: sessions, flow control, errors, and anything else sent to it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.drivers.direct import SESSION, Bare, bare_endpoint, ids_column, run, turns
from tests.fakes.scheduler import FakeScheduler
from toka_async.messages import Submits
from toka_async.protocol import (
    Ack,
    Bye,
    Cancellation,
    Closed,
    Columns,
    Error,
    Hello,
    Ping,
    Pong,
    Results,
    Submission,
    Welcome,
)
from toka_async.server.generate.events import MOST_TOKENS
from toka_async.server.zmq.delivery import WINDOW

# ---- sessions


async def test_hello(bare: Bare) -> None:
    bare.hello()
    ((welcome, _),) = bare.heard(Welcome)
    assert (welcome.version, welcome.resumed, welcome.window) == (4, False, WINDOW)
    assert (welcome.credit, welcome.vocab_size, welcome.max_context) == (16384, 400, 512)
    assert (welcome.heartbeat, welcome.max_message) == (10.0, 64 << 20)
    bare.say(Ping())
    assert len(bare.heard(Pong)) == 1


async def test_a_version_that_is_not_spoken_is_refused(bare: Bare) -> None:
    bare.say(Hello(versions=(1, 2), session=SESSION))
    ((closed, _),) = bare.heard(Closed)
    assert closed.code == "refused"
    assert "version 4" in closed.message
    assert not bare.heard(Welcome)


async def test_who_has_not_said_hello_is_told_so(bare: Bare) -> None:
    bare.submit(1)
    bare.say(Ack(ack=1))
    assert [closed.code for closed, _ in bare.heard(Closed)] == ["unknown", "unknown"]


async def test_before_the_engine_is_ready_nobody_is_welcome() -> None:
    with bare_endpoint(FakeScheduler(held=True, ready=None)) as bare:
        bare.hello()
        ((error, _),) = bare.heard(Error)
        assert (error.status, error.code, error.retry_after) == (503, "not_serving", 1)


async def test_a_broken_connection_is_taken_up_where_it_broke(bare: Bare) -> None:
    bare.hello()
    bare.submit(1, 2, max_tokens=2)
    bare.submit(3, max_tokens=4)
    await run(bare, 2)
    assert bare.ended() == [1, 2]
    (first,) = bare.heard(Results)
    bare.wire.gone.add(b"one")
    await run(bare)
    bare.hello(identity=b"two", received=0)
    ((welcome, _),) = bare.heard(Welcome, b"two")
    assert welcome.resumed
    assert bare.ended(b"two") == [1, 2, 3]
    again = bare.heard(Results, b"two")
    assert again[0][0] == first[0]
    bare.hello(identity=b"three", received=again[0][0].seq)
    assert bare.ended(b"three") == [3]


async def test_a_session_is_new_until_its_client_knows_that(bare: Bare) -> None:
    """The first welcome may get lost: what the client has had of a server before must not be taken for this one's."""
    bare.hello(received=7)
    bare.hello(identity=b"two", received=7)
    bare.submit(1, max_tokens=2, identity=b"two")
    bare.hello(identity=b"three", received=0)
    welcomes = [bare.heard(Welcome, identity)[0][0] for identity in (b"one", b"two", b"three")]
    assert [welcome.resumed for welcome in welcomes] == [False, False, True]
    assert bare.endpoint.num_sessions == 1


async def test_a_client_comes_back_while_every_replica_is_away(bare: Bare) -> None:
    """It hears what became of its requests, and is not taken for one that says nothing."""
    bare.hello()
    bare.submit(1, max_tokens=2)
    bare.wire.gone.add(b"one")
    bare.service.engine.lose(0, 1, "it was killed", bare.scheduler)
    await turns()
    bare.hello(identity=b"two")
    ((welcome, _),) = bare.heard(Welcome, b"two")
    assert welcome.resumed
    bare.submit(2, identity=b"two")
    await turns()
    assert [error.code for error, _ in bare.heard(Error, b"two")] == ["engine_stopped", "not_serving"]


async def test_a_client_that_says_nothing_for_too_long_is_gone() -> None:
    with bare_endpoint(zmq_grace=0.3) as bare:
        bare.hello()
        bare.submit(1, max_tokens=400)
        bare.submit(2, max_tokens=400, text=True)
        await run(bare, 2)
        assert bare.service.engine.num_requests == 2
        await asyncio.wait_for(bare.service.engine.wait_idle(), 60)
        assert bare.endpoint.num_sessions == 0
        bare.scheduler.step()
        assert not bare.scheduler.requests


async def test_a_word_is_enough_to_be_expected_for_longer(bare: Bare) -> None:
    bare.hello()
    (session,) = bare.endpoint._sessions.values()
    session.heard -= 1000
    bare.say(Ping())
    bare.endpoint._check_alive(session)
    assert bare.endpoint.num_sessions == 1
    session.heard -= 1000
    bare.endpoint._check_alive(session)
    assert bare.endpoint.num_sessions == 0


async def test_bye_ends_what_runs(bare: Bare) -> None:
    bare.hello()
    bare.submit(1, max_tokens=400)
    await run(bare, 2)
    bare.say(Bye())
    assert bare.service.engine.num_requests == 0
    assert bare.endpoint.num_sessions == 0
    await run(bare, 1)
    assert not bare.scheduler.requests


async def test_closing_waits_for_what_clients_are_owed(bare: Bare) -> None:
    bare.hello()
    bare.submit(1, max_tokens=2)
    await run(bare, 3)
    closing = asyncio.create_task(bare.endpoint.close(5))
    await turns()
    assert not closing.done()
    bare.say(Ack(ack=1))
    await asyncio.wait_for(closing, 60)
    assert [closed.code for closed, _ in bare.heard(Closed)] == ["stopping"]


# ---- requests


async def test_requests_of_a_message_are_one_message_to_the_scheduler_and_one_back(bare: Bare) -> None:
    bare.hello()
    bare.submit(*range(100, 150), max_tokens=3, logprobs=1)
    await run(bare, 4)
    assert [type(message) for message in bare.scheduler.log] == [Submits]
    ((results, columns),) = bare.heard(Results)
    assert columns["ids"].tolist() == [*range(100, 150)]
    assert (results.seq, results.num_top) == (1, 1)
    assert columns["counts"].tolist() == [3] * 50
    assert columns["token_ids"].size == columns["logprobs"].size == columns["top_ids"].size == 150
    assert columns["reasons"].tolist() == [2] * 50


async def test_the_same_id_twice_is_one_run(bare: Bare) -> None:
    bare.hello()
    bare.submit(7, max_tokens=3)
    bare.submit(7, max_tokens=3)
    await run(bare, 5)
    bare.submit(7, max_tokens=3)
    assert bare.ended() == [7]
    bare.submit(7, max_tokens=3, ack=1)
    await run(bare, 5)
    assert bare.ended() == [7, 7]
    (_, first), (_, second) = bare.heard(Results)
    assert {name: values.tolist() for name, values in first.items()} == {
        name: values.tolist() for name, values in second.items()
    }
    assert len([message for message in bare.scheduler.log if isinstance(message, Submits)]) == 1


async def test_streams_come_step_by_step(bare: Bare) -> None:
    bare.hello()
    bare.submit(1, 2, max_tokens=3, stream=True, n=2)
    await run(bare, 4)
    assert [columns["ids"].tolist() for _, columns in bare.heard(Results)] == [[1, 1, 2, 2]] * 3
    assert bare.ended() == [1, 1, 2, 2]


async def test_a_stream_of_many_tokens_leaves_others_their_turns(bare: Bare) -> None:
    bare.hello()
    bare.submit(1, max_tokens=400, stream=True, text=True, n=16, ignore_eos=True)
    await turns()
    for _ in range(401):
        bare.scheduler.step()
    await turns(40)
    results = bare.heard(Results)  # one of each turn
    assert max(columns["token_ids"].size for _, columns in results) < MOST_TOKENS + 400
    assert sum(columns["token_ids"].size for _, columns in results) == 16 * 400
    assert sorted(bare.ended()) == [1] * 16


async def test_a_cancelled_request_ends_once(bare: Bare) -> None:
    bare.hello()
    bare.submit(1, 2, 3, max_tokens=400)
    bare.submit(4, max_tokens=400, text=True)
    await run(bare, 2)
    bare.say(Cancellation(columns=("ids",)), ids_column(2, 4, 99))
    bare.say(Cancellation(columns=("ids",)), ids_column(2, 4))
    await run(bare, 2)
    ((error, columns),) = bare.heard(Error)
    assert (error.code, error.status, sorted(columns["ids"].tolist())) == ("cancelled", 499, [2, 4])
    assert bare.service.engine.num_requests == 2
    assert len(bare.scheduler.cancelled) == 2
    assert len(bare.scheduler.requests) == 2


async def test_only_what_is_wrong_is_refused(bare: Bare) -> None:
    bare.hello()
    columns: Columns = {
        "ids": np.asarray([1, 2, 3, 4, 5]),
        "lengths": np.asarray([2, 0, 1, 600, 1], np.int32),
        "prompts": np.asarray([5, 6, 400, *([1] * 600), -1], np.int32),
    }
    fields = msgspec.Raw(msgspec.msgpack.encode({"text": False, "max_tokens": 2}))
    bare.say(Submission(fields=fields, columns=tuple(columns)), columns)
    await run(bare, 3)
    assert bare.ended() == [1]
    said = {int(c["ids"][0]): (e.status, e.param, e.message) for e, c in bare.heard(Error)}
    assert said.keys() == {2, 3, 4, 5}
    assert {(status, param) for status, param, _ in said.values()} == {(400, "prompt")}
    assert "empty" in said[2][2]
    assert "400" in said[3][2]
    assert "512" in said[4][2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 2**40}, "n"),
        ({"nonsense": 1}, "nonsense"),
        ({"seed": 1}, "seed"),
        ({"tools": [1]}, "tools"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"model": "other"}, "model"),
        ({"logit_bias": {"401": 1.0}}, "logit_bias"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
async def test_a_wrong_field_is_named(bare: Bare, fields: dict[str, Any], param: str) -> None:
    bare.hello()
    bare.submit(1, 2, **fields)
    await turns()
    ids = [key for _, columns in bare.heard(Error) for key in columns["ids"].tolist()]
    assert ids == [1, 2]
    assert {error.param for error, _ in bare.heard(Error)} == {param}


async def test_texts_that_come_while_the_server_ends_can_be_asked_for_again(bare: Bare) -> None:
    """The threads that turn them into ids are gone before the connections are."""
    bare.hello()
    bare.service.executor.shutdown()
    columns: Columns = {
        "ids": np.asarray([1]),
        "lengths": np.asarray([1], np.int32),
        "texts": np.asarray([97], np.uint8),
    }
    raw = msgspec.Raw(msgspec.msgpack.encode({}))
    bare.say(Submission(fields=raw, ack=0, columns=tuple(columns)), columns)
    bare.service.engine.begin_drain()
    await turns()
    ((error, _),) = bare.heard(Error)
    assert error.code == "not_serving"


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"ids": [1]}, "lengths"),
        ({"lengths": [1]}, "ids"),
        ({"ids": [1], "lengths": [1]}, "prompts"),
        ({"ids": [1], "lengths": [1], "prompts": [1], "texts": [1]}, "prompts"),
        ({"ids": [1], "lengths": [1, 1], "prompts": [1, 1]}, "lengths"),
        ({"ids": [1], "lengths": [2], "prompts": [1]}, "prompts"),
        ({"ids": [-1], "lengths": [1], "prompts": [1]}, "ids"),
        ({"ids": [1], "lengths": [-1], "prompts": []}, "lengths"),
        ({"ids": [1], "lengths": [1], "prompts": [1], "seeds": []}, "seeds"),
        ({"ids": [1], "lengths": [1], "prompts": [1], "samples": [1]}, "samples"),
    ],
)
async def test_wrong_columns_are_named(bare: Bare, columns: dict[str, list[int]], field: str) -> None:
    bare.hello()
    made: Columns = {name: np.asarray(values) for name, values in columns.items()}
    bare.say(Submission(columns=tuple(made)), made)
    ((error, about),) = bare.heard(Error)
    assert (error.status, error.code, error.param, error.seq) == (400, "protocol", field, 0)
    assert about.keys() <= {"ids"}
    assert bare.service.engine.num_requests == 0


# ---- flow control
