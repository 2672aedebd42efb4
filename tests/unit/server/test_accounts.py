"""Accounts: whatever comes and goes, what is held is what was taken and not given back, and no limit is passed."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from toka_async.config import ServerConfig
from toka_async.openai.errors import ApiError
from toka_async.server.accounts import Account, Accounts
from toka_async.server.jobs import OverloadedError


def test_requests_and_tokens_of_one() -> None:
    account = Account("key alice", max_requests=2, max_tokens=100)
    with account.holding(1, 60):
        with pytest.raises(OverloadedError, match=r"key alice: 1 requests with 60 tokens .* 2 requests and 100 tokens"):
            account.check(1, 41)
        with account.holding(1, 40), pytest.raises(OverloadedError):
            account.check(1, 0)
    assert (account.num_requests, account.num_tokens, account.num_refused) == (0, 0, 2)


@pytest.mark.parametrize(("num_requests", "num_tokens"), [(3, 1), (1, 101)])
def test_what_never_fits_is_the_request_s_fault(num_requests: int, num_tokens: int) -> None:
    parent = Account("this server", max_tokens=100)
    account = Account("key alice", max_requests=2, parent=parent)
    with pytest.raises(ApiError, match="the limit is") as caught:
        account.check(num_requests, num_tokens)
    assert caught.value.status == 400
    assert account.most_tokens == 100


def test_a_parent_is_full() -> None:
    accounts = Accounts(ServerConfig(max_held_tokens=100, key_max_requests=5))
    alice, bob = accounts.open("alice"), accounts.open("bob", max_tokens=50)
    assert accounts.open("alice") is alice
    assert (alice.max_requests, alice.max_tokens, bob.max_requests, bob.max_tokens) == (5, 0, 5, 50)
    with alice.holding(1, 90):
        with pytest.raises(OverloadedError, match="this server"):
            bob.check(1, 11)
        num_fit, full = bob.fullest(np.asarray([5, 5, 5]))
        assert (num_fit, full) == (2, accounts.total)
    assert accounts.batches.most_tokens == 50


def test_room_is_told_of_to_who_was_refused() -> None:
    told: list[str] = []
    account = Account("x", max_requests=1)
    account.on_room = lambda: told.append("room")
    with account.holding(1, 1):
        pass
    assert told == []
    with account.holding(1, 1), pytest.raises(OverloadedError):
        account.check(1, 1)
    assert told == ["room"]


class Holding(RuleBasedStateMachine):
    """Two keys under one server."""

    def __init__(self) -> None:
        super().__init__()
        self.total = Account("server", max_requests=6, max_tokens=40)
        self.keys = [Account("a", 3, 20, self.total), Account("b", 0, 30, self.total)]
        self.held: list[tuple[int, int, int, ExitStack]] = []

    @rule(which=st.integers(0, 1), num_requests=st.integers(1, 4), num_tokens=st.integers(0, 45))
    def take(self, which: int, num_requests: int, num_tokens: int) -> None:
        stack = ExitStack()
        try:
            stack.enter_context(self.keys[which].holding(num_requests, num_tokens))
        except (OverloadedError, ApiError):
            return
        self.held.append((which, num_requests, num_tokens, stack))

    @rule(place=st.integers(0, 20))
    def give_back(self, place: int) -> None:
        if place < len(self.held):
            self.held.pop(place)[-1].close()

    @invariant()
    def adds_up(self) -> None:
        for which, key in enumerate(self.keys):
            mine = [(requests, tokens) for owner, requests, tokens, _ in self.held if owner == which]
            assert key.num_requests == sum(requests for requests, _ in mine)
            assert key.num_tokens == sum(tokens for _, tokens in mine) <= key.max_tokens
            assert key.num_requests <= (key.max_requests or key.num_requests)
        assert self.total.num_requests == sum(key.num_requests for key in self.keys) <= 6
        assert self.total.num_tokens == sum(key.num_tokens for key in self.keys) <= 40


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
