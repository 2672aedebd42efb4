from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import pytest

from tests.cases.tokenizers import byte_level
from tests.fakes.scheduler import FakeScheduler
from toka_async.arrays import as_bool
from toka_async.messages import DropStop, StopMask
from toka_async.server.engine.engine import Engine
from toka_async.server.generate.stop_sets import StopSets
from toka_async.text.stop import StopStrings
from toka_async.text.vocabulary import Vocabulary


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def make(executor: ThreadPoolExecutor, max_idle: int) -> tuple[FakeScheduler, StopSets]:
    scheduler = FakeScheduler(held=True)
    return scheduler, StopSets(Engine([scheduler], 10), byte_level(), executor, max_idle)


async def use(sets: StopSets, *strings: str) -> int:
    async with sets.use(StopStrings(strings), 400) as stop_id:
        return stop_id


async def test_masks_are_of_the_models_vocabulary(executor: ThreadPoolExecutor) -> None:
    scheduler, sets = make(executor, 4)
    await use(sets, "the")
    scheduler.step()
    (mask,) = scheduler.masks.values()
    stops = StopStrings(["the"])
    assert mask.window == stops.window
    assert as_bool(mask.mask).tolist() == stops.completion_mask(Vocabulary(byte_level()), 400).tolist()
    assert as_bool(mask.mask).any()


async def test_the_longest_idle_set_goes(executor: ThreadPoolExecutor) -> None:
    scheduler, sets = make(executor, 2)
    assert [await use(sets, text) for text in ("a", "b", "a", "c", "a", "b")] == [0, 1, 0, 2, 0, 3]
    scheduler.step()
    assert [message.stop_id for message in scheduler.log if isinstance(message, DropStop)] == [1, 2]
    assert sorted(scheduler.masks) == [0, 3]


async def test_sets_in_use_stay(executor: ThreadPoolExecutor) -> None:
    scheduler, sets = make(executor, 0)
    async with AsyncExitStack() as stack:
        ids = [await stack.enter_async_context(sets.use(StopStrings([text]), 400)) for text in ("a", "b", "a")]
        assert ids == [0, 1, 0]
        scheduler.step()
        assert sorted(scheduler.masks) == [0, 1]
    scheduler.step()
    assert not scheduler.masks


async def test_users_at_once_share_a_registration(executor: ThreadPoolExecutor) -> None:
    scheduler, sets = make(executor, 4)
    assert await asyncio.gather(*(use(sets, "a", "b") for _ in range(3)), use(sets, "b", "a")) == [0] * 4
    scheduler.step()
    assert [type(message) for message in scheduler.log] == [StopMask]


async def test_a_failure_is_not_kept(executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    _, sets = make(executor, 4)
    with monkeypatch.context() as patch:
        patch.setattr(StopStrings, "completion_mask", lambda *_args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await use(sets, "a")
    assert await use(sets, "a") == 1
