from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.drivers.config import make_config
from toka_async.openai.errors import ApiError
from toka_async.server.limits.account import Account, Cost
from toka_async.server.limits.accounts import Accounts
from toka_async.server.limits.jobs import OverloadedError
from toka_async.server.limits.window import EngineLoad


def accounts_of(**config: int) -> Accounts:
    """With room for samples of batches."""
    made = make_config(**{"max_waiting": 100} | config)
    accounts = Accounts(made.limits, made.auth)
    accounts.window.report(EngineLoad(1000))
    return accounts


class Entering:
    """Tasks that enter; the names of those that have, in order."""

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self.entered: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, account: Account, num_tokens: int = 1, num_samples: int = 1) -> None:
        async def enter() -> None:
            await self.accounts.enter(account, Cost(1, num_tokens, num_samples))
            self.entered.append(name)

        self.tasks[name] = asyncio.create_task(enter())
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.accounts.queue.check()


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
        alice.give_back(Cost(1, 1))
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
        account.give_back(Cost(1, 1))
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
    alice.give_back(Cost(1, 60))
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
    alice.give_back(Cost(1, 1))
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
    alice.give_back(Cost(1, 1))
    await entering.settle()
    assert entering.entered == ["a1", "a2"]
    alice.give_back(Cost(1, 1))
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
    alice.give_back(Cost(1, 40))
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
    bob.give_back(Cost(1, 26))
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


async def test_lines_wait_for_the_window_and_hold_none_of_it_while_they_wait_elsewhere() -> None:
    accounts = accounts_of(max_requests=8)  # of which batches have half
    lines = [accounts.batches_of(accounts.open(name, requests)) for name, requests in (("alice", 1), ("bob", 0))]
    entering = Entering(accounts)
    for name in ("a1", "a2"):
        await entering.start(name, lines[0], num_samples=2)
    for name in ("b1", "b2", "b3"):
        await entering.start(name, lines[1], num_samples=2)
    assert (entering.entered, accounts.window.in_flight) == (["a1", "b1"], 4)
    lines[0].give_back(Cost(1, 1, 2))
    await entering.settle()
    assert entering.entered == ["a1", "b1", "a2"], "it came before b2"
    accounts.window.close()
    lines[1].give_back(Cost(1, 1, 2))
    await entering.settle()
    assert entering.entered == ["a1", "b1", "a2"]
    accounts.window.report(EngineLoad(4))
    await entering.settle()
    assert entering.entered == ["a1", "b1", "a2", "b2"]
    entering.tasks["b3"].cancel()
    await entering.settle()


async def test_a_request_that_is_cancelled_as_its_limits_are_lowered_gives_nothing_back() -> None:
    accounts = accounts_of()
    alice, entering = accounts.open("alice", max_tokens=50), Entering(accounts)
    await entering.start("a", alice, 30)
    await entering.start("large", alice, 40)
    accounts.open("alice", max_tokens=35)
    entering.tasks["large"].cancel()
    await entering.settle()
    assert (alice.num_tokens, alice.num_waiting) == (30, 0)


class Holding(RuleBasedStateMachine):
    """Two keys and the batches of both, under one server."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.accounts = accounts_of(max_requests=6, max_held_tokens=40, max_waiting=5)
        keys = [self.accounts.open("a", 3, 20), self.accounts.open("b", 0, 30)]
        self.owners = [*keys, *map(self.accounts.batches_of, keys)]
        self.held: list[tuple[Account, Cost]] = []
        self.tasks: dict[asyncio.Task[None], tuple[Account, Cost]] = {}

    @rule(which=st.integers(0, 3), cost=st.builds(Cost, st.integers(1, 4), st.integers(0, 45), st.integers(1, 4)))
    def enter(self, which: int, cost: Cost) -> None:
        what = (self.owners[which], cost)
        self.tasks[self.loop.create_task(self.accounts.enter(*what))] = what
        self.turn()

    @rule(place=st.integers(0, 20))
    def give_back(self, place: int) -> None:
        if place < len(self.held):
            account, cost = self.held.pop(place)
            account.give_back(cost)
            self.turn()

    @rule(place=st.integers(0, 20), also_ends=st.booleans())
    def leave(self, place: int, also_ends: bool) -> None:
        if place < len(self.tasks):
            if also_ends and self.held:  # it may enter at the same time
                account, cost = self.held.pop()
                account.give_back(cost)
            list(self.tasks)[place].cancel()
            self.turn()

    @rule(rows=st.integers(0, 4))
    def report(self, rows: int) -> None:
        self.accounts.window.report(EngineLoad(rows))
        self.turn()

    @rule(max_tokens=st.integers(10, 30))
    def change(self, max_tokens: int) -> None:
        self.accounts.open("a", 3, max_tokens)
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
        self.accounts.queue.check()
        total, window = self.accounts.total, self.accounts.window
        for key in (*self.owners, self.accounts.batches, total):
            mine = [cost for account, cost in self.held if key in account.lineage]
            assert key.num_requests == sum(cost.requests for cost in mine) <= (key.max_requests or 99)
            assert key.num_tokens == sum(cost.tokens for cost in mine)
            assert key.num_tokens <= (key.max_tokens or 99) or key.owner == "a"  # whose limit may have been lowered
        assert window.in_flight == sum(cost.samples for account, cost in self.held if account.is_behind)
        for owner in self.owners:
            waiting = sum(cost.requests for account, cost in self.tasks.values() if account is owner)
            assert owner.num_waiting == waiting
        assert total.num_waiting == sum(owner.num_waiting for owner in self.owners[:2]) <= 5

    def teardown(self) -> None:
        """With nothing held, all that wait enter, or the last of them leave."""
        self.report(4)
        while self.held:
            self.give_back(0)
        assert not self.tasks
        assert self.accounts.total.num_requests == self.accounts.window.in_flight == 0
        self.loop.close()


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
