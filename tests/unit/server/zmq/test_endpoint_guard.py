"""Limits of each client of direct submission, and deadlines of its requests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from tests.drivers.direct import Bare, bare_endpoint, turns
from tests.drivers.until import until
from toka_async.messages import Cancels
from toka_async.protocol import Closed, Error, Welcome


@pytest.fixture
async def bare(request: pytest.FixtureRequest) -> AsyncIterator[Bare]:
    """Parameter: `limits.request_timeout`; none: no such limit."""
    timeout = getattr(request, "param", 0.0)
    with bare_endpoint(key_max_held_tokens=50, max_held_tokens=100, request_timeout=timeout) as made:
        made.wire.sender = "a" * 40
        made.hello()
        yield made


def errors(bare: Bare, identity: bytes = b"one") -> list[tuple[int, list[int]]]:
    return [(header.status, columns["ids"].tolist()) for header, columns in bare.heard(Error, identity)]


@pytest.mark.parametrize("text", [False, True])
async def test_a_client_s_key_has_its_share(bare: Bare, text: bool) -> None:
    accounts = bare.service.accounts
    bare.submit(1, 2, 3, max_tokens=17, text=text)  # 20 tokens each
    await turns()
    assert errors(bare) == [(429, [3])]
    assert accounts.by_name["client " + "a" * 40].num_tokens == accounts.total.num_tokens == 40
    bare.hello(session=b"f" * 16, identity=b"two")  # another session of the same client
    bare.submit(1, max_tokens=17, identity=b"two")
    bare.submit(2, max_tokens=60, identity=b"two")
    await turns()
    assert sorted(errors(bare, b"two")) == [(400, [2]), (429, [1])]
    for _ in range(20):
        bare.scheduler.step()
        await turns()
    assert sorted(bare.ended()) == [1, 2]
    assert accounts.total.num_requests == accounts.total.num_tokens == 0


async def test_a_session_belongs_to_one_key(bare: Bare) -> None:
    bare.wire.sender = "b" * 40
    bare.hello(identity=b"thief")
    assert bare.heard(Welcome, b"thief") == []
    ((closed, _),) = bare.heard(Closed, b"thief")
    assert closed.code == "refused"


def timed_out(bare: Bare) -> list[int]:
    """Requests that were ended for their time, in however many messages."""
    return sorted(number for status, numbers in errors(bare) if status == 504 for number in numbers)


@pytest.mark.parametrize("bare", [0.05], indirect=True)
async def test_direct_requests_that_take_too_long(bare: Bare) -> None:
    bare.submit(1, max_tokens=10)
    bare.submit(2, max_tokens=10)
    await until(lambda: timed_out(bare) == [1, 2])
    bare.submit(3, max_tokens=10)
    await turns()
    bare.scheduler.step()
    cancelled = [m for m in bare.scheduler.log if isinstance(m, Cancels)]
    assert sum(np.frombuffer(m.request_ids, np.int32).size for m in cancelled) >= 2
    await until(lambda: timed_out(bare) == [1, 2, 3])
    assert bare.service.accounts.total.num_requests == 0
    assert bare.service.accounts.total.num_tokens == 0


async def test_a_client_that_leaves_gives_everything_back(bare: Bare) -> None:
    bare.submit(1, max_tokens=10)
    await turns()
    assert bare.service.accounts.total.num_tokens == 13
    await bare.endpoint.close(0)
    assert bare.service.accounts.total.num_tokens == 0
