"""Who waits for room enters in order and in turn, nobody is overtaken or forgotten, and what is held adds up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.drivers.config import make_config
from toka_async.openai.errors import ApiError
from toka_async.server.limits.account import Account
from toka_async.server.limits.accounts import Accounts
from toka_async.server.limits.jobs import OverloadedError


def accounts_of(**config: int) -> Accounts:
    made = make_config(**{"max_waiting": 100} | config)
    return Accounts(made.limits, made.auth)


class Entering:
    """Tasks that enter; the names of those that have, in order."""

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self.entered: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, account: Account, num_tokens: int = 1, num_requests: int = 1) -> None:
        async def enter() -> None:
            await self.accounts.turns.enter(account, num_requests, num_tokens)
            self.entered.append(name)

        self.tasks[name] = asyncio.create_task(enter())
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.accounts.turns.check()


async def test_in_order_within_an_account_and_then_no_more() -> None:
    accounts = accounts_of(max_waiting=2)
    alice, entering = accounts.open("alice", max_requests=1), Entering(accounts)
    for name in "abcd":
        await entering.start(name, alice)
    assert entering.entered == ["a"]
    with pytest.raises(OverloadedError, match="alice: 1 requests"):
        await entering.tasks["d"]
    assert (alice.num_waiting, accounts.total.num_waiting, alice.num_refused) == (2, 2, 1)
    for number in range(3):
        alice.give_back(1, 1)
        await entering.settle()
        assert entering.entered == ["a", "b", "c"][: number + 2]
    assert alice.num_requests == alice.num_waiting == 0


async def test_a_limit_of_its_own_on_who_waits() -> None:
    accounts = accounts_of(key_max_waiting=1, max_requests=1)
    entering = Entering(accounts)
    for name in ("a1", "a2", "a3", "b1"):
        await entering.start(name, accounts.open(name[0]))
    assert isinstance(entering.tasks["a3"].exception(), OverloadedError)
    assert not entering.tasks["b1"].done()
    for name in ("a2", "b1"):
        entering.tasks[name].cancel()
    await entering.settle()


async def test_accounts_take_turns() -> None:
    accounts = accounts_of(max_requests=1)
    alice, bob, entering = accounts.open("alice"), accounts.open("bob"), Entering(accounts)
    for name in ("a1", "a2", "a3", "a4"):
        await entering.start(name, alice)
    for name in ("b1", "b2"):
        await entering.start(name, bob)
    for account in (alice, alice, bob, alice, bob, alice):
        account.give_back(1, 1)
        await entering.settle()
    assert entering.entered == ["a1", "a2", "b1", "a3", "b2", "a4"]


async def test_who_is_at_its_own_limit_is_in_nobody_s_way() -> None:
    accounts = accounts_of()
    alice, bob, entering = accounts.open("alice", max_requests=1), accounts.open("bob"), Entering(accounts)
    for name, account in (("a1", alice), ("a2", alice), ("b1", bob)):
        await entering.start(name, account)
    assert entering.entered == ["a1", "b1"]
    entering.tasks["a2"].cancel()
    await entering.settle()
    assert accounts.total.num_waiting == 0


async def test_a_large_one_is_not_overtaken_for_what_all_share() -> None:
    accounts = accounts_of(max_held_tokens=100)
    alice, bob, entering = accounts.open("alice"), accounts.open("bob"), Entering(accounts)
    await entering.start("a", alice, 60)
    await entering.start("large", alice, 90)
    await entering.start("small", bob, 10)
    assert entering.entered == ["a"]
    alice.give_back(1, 60)
    await entering.settle()
    assert entering.entered == ["a", "large", "small"]


async def test_who_leaves_makes_way() -> None:
    accounts = accounts_of(max_held_tokens=100)
    alice, bob, entering = accounts.open("alice"), accounts.open("bob"), Entering(accounts)
    await entering.start("a", alice, 60)
    await entering.start("large", alice, 90)
    await entering.start("small", bob, 10)
    entering.tasks["large"].cancel()
    await entering.settle()
    assert entering.entered == ["a", "small"]
    assert accounts.total.num_tokens == 70


async def test_who_leaves_as_it_enters_gives_back() -> None:
    accounts = accounts_of()
    alice, entering = accounts.open("alice", max_requests=1), Entering(accounts)
    await entering.start("a", alice)
    await entering.start("b", alice)
    await entering.start("c", alice)
    alice.give_back(1, 1)
    entering.tasks["b"].cancel()
    await entering.settle()
    assert entering.entered == ["a", "c"]
    assert alice.num_requests == 1


async def test_batches_are_behind_and_wait_without_a_limit() -> None:
    accounts = accounts_of(max_waiting=1)
    alice, entering = accounts.open("alice", max_requests=1), Entering(accounts)
    lines = accounts.batches_of(alice)
    for name, account in (("a1", alice), ("l1", lines), ("l2", lines), ("l3", lines), ("a2", alice)):
        await entering.start(name, account)
    assert (lines.num_waiting, alice.num_waiting) == (3, 1)
    alice.give_back(1, 1)
    await entering.settle()
    assert entering.entered == ["a1", "a2"]
    alice.give_back(1, 1)
    await entering.settle()
    assert entering.entered == ["a1", "a2", "l1"]
    for name in ("l2", "l3"):
        entering.tasks[name].cancel()
    await entering.settle()


async def test_waiting_lines_refuse_no_request() -> None:
    """Where nobody may wait, what there is room for goes in at once."""
    accounts = accounts_of(max_waiting=0, max_held_tokens=100)
    alice, entering = accounts.open("alice"), Entering(accounts)
    lines = accounts.batches_of(accounts.total)
    await entering.start("l1", lines, 50)
    await entering.start("l2", lines, 50)
    await entering.start("a", alice, 40)
    assert entering.entered == ["l1", "a"]
    alice.give_back(1, 40)
    entering.tasks["l2"].cancel()
    await entering.settle()


async def test_nobody_waits_for_what_waiting_lines_need() -> None:
    """A line waits for the server's room, another key for its own: once there is room, both enter."""
    accounts = accounts_of(max_held_tokens=40)
    alice, bob = accounts.open("alice"), accounts.open("bob", 0, 30)
    entering = Entering(accounts)
    await entering.start("b1", bob, 26)
    await entering.start("b2", bob, 5)
    await entering.start("line", accounts.batches_of(alice), 15)
    assert entering.entered == ["b1"]
    bob.give_back(1, 26)
    await entering.settle()
    assert entering.entered == ["b1", "b2", "line"]


async def test_limits_that_change() -> None:
    accounts = accounts_of()
    alice, entering = accounts.open("alice", max_requests=1, max_tokens=50), Entering(accounts)
    await entering.start("a", alice)
    await entering.start("b", alice)
    await entering.start("large", alice, 40)
    await entering.start("c", alice)
    assert accounts.open("alice", max_requests=2, max_tokens=50) is alice
    await entering.settle()
    assert entering.entered == ["a", "b"]
    accounts.open("alice", max_requests=3, max_tokens=30)
    await entering.settle()
    assert entering.entered == ["a", "b", "c"]
    assert isinstance(entering.tasks["large"].exception(), ApiError)
    assert (alice.num_waiting, alice.num_requests) == (0, 3)


async def test_what_is_done_while_one_waits() -> None:
    accounts = accounts_of()
    events: list[str] = []

    @contextmanager
    def waiting(num_samples: int) -> Iterator[None]:
        events.append(f"waits {num_samples}")
        yield
        events.append("entered")

    accounts.batches.while_waiting = waiting
    lines = accounts.batches_of(accounts.open("alice", max_requests=1))
    await accounts.turns.enter(lines, 1, 1, 5)
    task = asyncio.create_task(accounts.turns.enter(lines, 1, 1, 7))
    gone = asyncio.create_task(accounts.turns.gone(lines))
    await asyncio.sleep(0)
    assert (events, gone.done()) == (["waits 7"], False)
    lines.give_back(1, 1)
    await asyncio.gather(task, gone)
    assert events == ["waits 7", "entered"]


class Holding(RuleBasedStateMachine):
    """Two keys and the batches of one of them, under one server."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.accounts = accounts_of(max_requests=6, max_held_tokens=40, max_waiting=5)
        alice = self.accounts.open("a", 3, 20)
        self.keys = [alice, self.accounts.open("b", 0, 30), self.accounts.batches_of(alice)]
        self.held: list[tuple[Account, int, int]] = []
        self.tasks: dict[asyncio.Task[None], tuple[Account, int, int]] = {}

    @rule(which=st.integers(0, 2), num_requests=st.integers(1, 4), num_tokens=st.integers(0, 45))
    def enter(self, which: int, num_requests: int, num_tokens: int) -> None:
        what = (self.keys[which], num_requests, num_tokens)
        self.tasks[self.loop.create_task(self.accounts.turns.enter(*what))] = what
        self.turn()

    @rule(place=st.integers(0, 20))
    def give_back(self, place: int) -> None:
        if place < len(self.held):
            account, num_requests, num_tokens = self.held.pop(place)
            account.give_back(num_requests, num_tokens)
            self.turn()

    @rule(place=st.integers(0, 20), also_ends=st.booleans())
    def leave(self, place: int, also_ends: bool) -> None:
        if place < len(self.tasks):
            if also_ends and self.held:  # it may enter at the same time
                account, num_requests, num_tokens = self.held.pop()
                account.give_back(num_requests, num_tokens)
            list(self.tasks)[place].cancel()
            self.turn()

    def turn(self) -> None:
        async def turns() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        for task in [task for task in self.tasks if task.done()]:
            what = self.tasks.pop(task)
            if not task.cancelled() and task.exception() is None:
                self.held.append(what)
            elif not task.cancelled():
                assert isinstance(task.exception(), OverloadedError | ApiError)

    @invariant()
    def adds_up(self) -> None:
        self.accounts.turns.check()
        total = self.accounts.total
        for key in (*self.keys, self.accounts.batches, total):
            mine = [(requests, tokens) for account, requests, tokens in self.held if key in account.lineage]
            assert key.num_requests == sum(requests for requests, _ in mine) <= (key.max_requests or 99)
            assert key.num_tokens == sum(tokens for _, tokens in mine) <= (key.max_tokens or 99)
        asked = [requests for account, requests, _ in self.tasks.values() if not account.is_behind]
        assert total.num_waiting == sum(asked) <= 5

    def teardown(self) -> None:
        """With nothing held, all that wait enter, or the last of them leave."""
        while self.held:
            self.give_back(0)
        assert not self.tasks
        assert self.accounts.total.num_requests == 0
        self.loop.close()


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
