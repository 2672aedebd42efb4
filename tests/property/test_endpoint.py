"""Whatever a client sends to the endpoint of direct submission: an answer of the protocol, and others are served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests.cases.wire import Frames
from tests.cases.wire_messages import SAID
from tests.drivers.direct import Bare, bare_endpoint
from tests.drivers.until import turns
from tests.fakes.scheduler import FakeScheduler
from toka_async.protocol import Ack, Bye, Error

FAITHFUL = b"faithful" * 2


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
@given(messages=SAID)
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
