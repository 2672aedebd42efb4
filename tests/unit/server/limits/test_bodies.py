from __future__ import annotations

import asyncio

import pytest

from toka_async.server.limits.bodies import Bodies, Room
from toka_async.server.limits.jobs import OverloadedError


class Reserving:
    """Tasks that reserve; the names of those that have, in order."""

    def __init__(self, most: int, share: int) -> None:
        self.bodies = Bodies(most, share)
        self.order: list[str] = []
        self.rooms: dict[str, Room] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, num_bytes: int, timeout: float = 0.0) -> None:
        """The owner is the name's first letter."""

        async def reserve() -> None:
            self.rooms[name] = await self.bodies.reserve(name[0], num_bytes, timeout)
            self.order.append(name)

        self.tasks[name] = asyncio.create_task(reserve())
        await self.settle()

    async def end(self, name: str, num_bytes: int = 0) -> None:
        self.rooms[name].shrink(num_bytes)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


async def test_owners_take_turns_and_each_has_its_share_only() -> None:
    reserving = Reserving(10, 5)
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        await reserving.start(name, 5)
    assert reserving.order == ["a1", "b1"]
    await reserving.end("a1")
    await reserving.end("b1")
    assert reserving.order[2:] == ["a2", "b2"]
    await reserving.end("a2")
    await reserving.end("b2")
    assert reserving.order[4:] == ["c1", "a3"]
    await reserving.end("c1")
    await reserving.end("a3")
    assert (reserving.bodies.num_bytes, reserving.bodies.num_waiting) == (0, 0)


async def test_who_needs_less_than_it_seemed_makes_room() -> None:
    reserving = Reserving(10, 10)
    await reserving.start("a", 10)
    await reserving.start("b", 7)
    await reserving.end("a", 3)
    assert reserving.order == ["a", "b"]
    assert reserving.bodies.num_bytes == 10
    await reserving.end("a")
    await reserving.end("a")  # once more gives back nothing
    assert reserving.bodies.num_bytes == 7


async def test_who_waits_too_long_is_told_the_setting() -> None:
    reserving = Reserving(2 << 20, 1 << 20)
    await reserving.start("a1", 1 << 20)
    await reserving.start("a2", 1, timeout=0.01)
    await reserving.start("a3", 1 << 20)
    with pytest.raises(OverloadedError, match=r"limits\.max_bodies_mb is 2 MiB .* 1 MiB for those of one key"):
        await reserving.tasks["a2"]
    assert (reserving.bodies.num_refused, reserving.bodies.num_waiting) == (1, 1)
    await reserving.end("a1")
    assert reserving.order == ["a1", "a3"]
