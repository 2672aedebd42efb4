"""What a caller sees of its requests: tokens when it is ready for them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.cases.requests import make_block, tokens_by_sample
from toka_async.messages import Reason
from toka_async.server.engine.request_group import RequestFailedError, RequestGroup
from toka_async.server.engine.token_block import Score


async def test_news_has_each_sample_once() -> None:
    group = RequestGroup(1, 2, stream=True)
    group.on_tokens(make_block([(0, [1], Reason.NONE), (1, [2], Reason.NONE)]))
    assert tokens_by_sample(await group.news(99)) == {(0, 0): [1], (0, 1): [2]}
    waiting = asyncio.create_task(group.news(99))
    await asyncio.sleep(0)
    assert not waiting.done()
    group.on_tokens(make_block([(1, [3], Reason.NONE)]))
    group.on_tokens(make_block([(1, [4], Reason.LENGTH), (0, [5, 6], Reason.NONE)]))
    block = await waiting
    assert tokens_by_sample(block) == {(0, 0): [5, 6], (0, 1): [3, 4]}
    assert block.reasons.tolist() == [Reason.NONE, Reason.LENGTH]
    assert group.num_tokens == 6


async def test_much_news_comes_in_parts_and_each_sample_has_its_turn() -> None:
    """A slow client's stream keeps nobody waiting for long."""
    group = RequestGroup(1, 8, stream=True)
    group.on_tokens(make_block([(sample, [0] * 50, Reason.NONE) for sample in range(8)]))
    turns: list[int] = []
    for first in range(0, 8, 2):
        asyncio.get_running_loop().call_soon(turns.append, 1)
        assert (await group.news(100)).samples.tolist() == [first, first + 1]
        assert turns
        turns.clear()
        group.on_tokens(make_block([(0, [first], Reason.NONE)]))
    assert tokens_by_sample(await group.news(100)) == {(0, 0): [0, 2, 4, 6]}


async def test_tokens_are_received_at_once_unless_others_wait() -> None:
    group, received, scored = RequestGroup(1, 1, stream=True), list[int](), list[Score]()
    score: Score = (-1.0, [6, 5], [-1.0, -2.0])

    def receive(ids: list[int], scores: list[Score]) -> bool:
        received.extend(ids)
        scored.extend(scores)
        return len(received) < 5

    assert not group.offer([1], [])  # nobody receives yet
    group.receive = receive
    assert group.offer([2, 3], [])
    group.on_tokens(make_block([(0, [4], Reason.NONE)]))
    assert not group.offer([5], [])
    assert tokens_by_sample(await group.news(99)) == {(0, 0): [4]}
    assert group.offer([6], [score])
    assert not group.offer([7, 8], [])
    assert received == [2, 3, 6, 7, 8]
    assert scored == [score]
    assert group.num_tokens == 4


async def test_what_has_come_is_taken_before_an_error_is_raised() -> None:
    group = RequestGroup(2, 1, stream=True)
    group.on_tokens(make_block([(0, [1], Reason.NONE)]))
    group.on_failed(np.asarray([1]), RequestFailedError("too long"))
    await group.news(9)
    with pytest.raises(RequestFailedError, match="too long"):
        await group.news(9)


async def test_requests_that_run_again_have_the_tokens_of_their_second_run_alone() -> None:
    group = RequestGroup(2, 2, stream=False)
    group.on_tokens(make_block([(1, [1], Reason.LENGTH), (0, [2], Reason.LENGTH)], key=1))
    group.on_tokens(make_block([(0, [3], Reason.LENGTH)]))
    assert group.forget(np.asarray([0]))
    assert group.num_tokens == 2
    waiting = asyncio.create_task(group.finished())
    group.on_tokens(make_block([(1, [4], Reason.LENGTH)]))
    await asyncio.sleep(0)
    assert not waiting.done()
    group.on_tokens(make_block([(0, [5], Reason.LENGTH)]))
    assert tokens_by_sample(await waiting) == {(0, 0): [5], (0, 1): [4], (1, 0): [2], (1, 1): [1]}


def test_a_stream_cannot_run_again() -> None:
    assert not RequestGroup(1, 1, stream=True).forget(np.asarray([0]))
