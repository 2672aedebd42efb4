"""Room for bodies: in order, in turn, never more than there is, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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
        self.bodies.check()


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


async def test_a_large_one_is_not_overtaken_but_makes_way_when_it_leaves() -> None:
    reserving = Reserving(10, 10)
    await reserving.start("a", 6)
    await reserving.start("b", 8)
    await reserving.start("c", 1)
    assert reserving.order == ["a"]
    reserving.tasks["b"].cancel()
    await reserving.settle()
    assert reserving.order == ["a", "c"]


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


async def test_cancelled_in_the_moment_of_its_turn() -> None:
    reserving = Reserving(10, 10)
    await reserving.start("a", 10)
    await reserving.start("b", 10)
    reserving.rooms["a"].shrink(0)
    reserving.tasks["b"].cancel()
    await reserving.settle()
    assert (reserving.order, reserving.bodies.num_bytes) == (["a"], 0)


async def test_room_in_the_moment_of_a_cancellation_goes_to_the_next() -> None:
    reserving = Reserving(10, 10)
    for name in "abc":
        await reserving.start(name, 10)
    reserving.tasks["b"].cancel()
    reserving.rooms["a"].shrink(0)
    await reserving.settle()
    assert reserving.order == ["a", "c"]


class Holding(RuleBasedStateMachine):
    """Three owners; at every moment those that wait cannot enter, and at the end nobody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.bodies = Bodies(20, 10)
        self.rooms: list[Room] = []
        self.tasks: list[asyncio.Task[Room]] = []

    @rule(owner=st.sampled_from("abc"), num_bytes=st.integers(1, 10))
    def reserve(self, owner: str, num_bytes: int) -> None:
        self.tasks.append(self.loop.create_task(self.bodies.reserve(owner, num_bytes, 0.0)))
        self.turn()

    @rule(place=st.integers(0, 9), left=st.integers(0, 4))
    def give_back(self, place: int, left: int) -> None:
        if place < len(self.rooms):
            room = self.rooms[place]
            room.shrink(min(left, room.num_bytes))
            self.turn()

    @rule(place=st.integers(0, 9), also_ends=st.booleans())
    def leave(self, place: int, also_ends: bool) -> None:
        if place < len(self.tasks):
            if also_ends and self.rooms:
                self.rooms[0].shrink(0)
            self.tasks[place].cancel()
            self.turn()

    def turn(self) -> None:
        async def turns() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        self.rooms += [task.result() for task in self.tasks if task.done() and not task.cancelled()]
        self.tasks = [task for task in self.tasks if not task.done()]
        self.rooms = [room for room in self.rooms if room.num_bytes]

    @invariant()
    def adds_up(self) -> None:
        self.bodies.check()
        assert self.bodies.num_bytes == sum(room.num_bytes for room in self.rooms)
        assert self.bodies.num_waiting == len(self.tasks)

    def teardown(self) -> None:
        while self.rooms:
            self.rooms[0].shrink(0)
            self.turn()
        assert not self.tasks
        self.loop.close()


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
