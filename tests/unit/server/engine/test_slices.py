"""Work on many things lets others have their turns."""

from __future__ import annotations

import asyncio

import pytest

from toka_async.server.engine.slices import SLICE, in_slices


@pytest.mark.parametrize(("num", "num_turns"), [(0, 0), (SLICE - 1, 0), (SLICE, 1), (5 * SLICE + 1, 5)])
async def test_a_turn_after_every_slice(num: int, num_turns: int) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    assert [item async for item in in_slices(range(num))] == list(range(num))
    assert turns == num_turns
    task.cancel()
