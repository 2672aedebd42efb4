"""Whatever a client sends to the endpoint of direct submission: an answer of the protocol, and others are served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.direct import SESSION, Bare, bare_endpoint, turns
from tests.fake_scheduler import FakeScheduler
from tests.wire_cases import FRAMES, VALUES, WORDS, Frames, mutated
from toka_async.openai.requests import DirectRequest
from toka_async.protocol import (
    Ack,
    Bye,
    Cancellation,
    Columns,
    Error,
    FromClient,
    Hello,
    Ping,
    Submission,
    pack,
)

FAITHFUL = b"faithful" * 2
NAMES = st.sampled_from(DirectRequest.__struct_encode_fields__)
ASKED: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 8)},
    optional={
        "text": st.booleans(),
        "n": st.integers(1, 3),
        "stream": st.booleans(),
        "stop": st.just(["e", "x"]),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 3),
        "temperature": st.floats(0, 2),
        "priority": st.integers(-5, 5),
    },
)
WISHES = ASKED | st.dictionaries(NAMES | WORDS, VALUES, max_size=3)


def frames_of(header: FromClient, columns: Columns | None = None) -> Frames:
    return [bytes(frame) for frame in pack(header, columns)]


def submission(ids: list[int], lengths: list[int], fields: Mapping[str, object], text: bool, seeds: bool) -> Frames:
    lengths = [*lengths, *[1] * len(ids)][: len(ids)]
    columns: Columns = {"ids": np.asarray(ids, np.int64), "lengths": np.asarray(lengths, np.int32)}
    if text:
        columns["texts"] = np.full(sum(lengths), ord("e"), np.uint8)
    else:
        columns["prompts"] = np.full(sum(lengths), 7, np.int32)
    if seeds:
        columns["seeds"] = np.asarray(ids, np.int64)
    raw = msgspec.Raw(msgspec.msgpack.encode(fields))
    return frames_of(Submission(fields=raw, columns=tuple(columns)), columns)


IDS = st.lists(st.integers(0, 9), max_size=4)
MESSAGES = st.one_of(
    st.builds(submission, IDS, st.lists(st.integers(0, 5), max_size=4), WISHES, st.booleans(), st.booleans()),
    st.builds(submission, IDS, st.lists(st.integers(0, 600), max_size=4), ASKED, st.booleans(), st.booleans()),
    st.builds(lambda ids: frames_of(Cancellation(columns=("ids",)), {"ids": np.asarray(ids, np.int64)}), IDS),
    st.builds(lambda seq: frames_of(Ack(ack=seq)), st.integers(0, 2**63 - 1)),
    st.builds(
        lambda versions, session: frames_of(Hello(versions=tuple(versions), session=session)),
        st.lists(st.integers(0, 3), min_size=1, max_size=3),
        st.sampled_from([SESSION, b"other" * 4]),
    ),
    st.sampled_from([frames_of(Ping()), frames_of(Bye())]),
)


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[asyncio.AbstractEventLoop, Bare]]:
    """One endpoint for all that is sent to it."""
    loop = asyncio.new_event_loop()

    async def make() -> tuple[Bare, object]:
        manager = bare_endpoint(FakeScheduler())
        return manager.__enter__(), manager

    bare, manager = loop.run_until_complete(make())
    yield loop, bare
    manager.__exit__(None, None, None)  # type: ignore[attr-defined]
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(mutated(MESSAGES) | FRAMES, min_size=1, max_size=4))
def test_nothing_that_is_sent_harms_the_endpoint(
    world: tuple[asyncio.AbstractEventLoop, Bare], caplog: pytest.LogCaptureFixture, messages: list[Frames]
) -> None:
    loop, bare = world

    async def send() -> None:
        bare.wire.sent.clear()
        bare.hello()
        for frames in messages:
            bare.wire.deliver([b"one", *frames])
            bare.wire.deliver([b"nobody", *frames])
            await turns()
        errors = [error for who in (b"one", b"nobody") for error, _ in bare.heard(Error, who)]
        assert not [error for error in errors if error.status == 500]
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        for identity in (b"one", b"nobody"):
            bare.say(Bye(), identity=identity)
        await serve_faithful(bare)
        assert bare.service.engine.num_requests == 0

    loop.run_until_complete(send())


async def serve_faithful(bare: Bare) -> None:
    """Another client's request ends as if nothing had been."""
    bare.hello(identity=b"good", session=FAITHFUL)
    number = bare.endpoint._sessions[FAITHFUL].delivery._seq + 1
    bare.submit(number, max_tokens=1, identity=b"good")
    for _ in range(50):
        await turns()
        if number in bare.ended(b"good"):
            break
    assert number in bare.ended(b"good")
    bare.say(Ack(ack=10**9), identity=b"good")
