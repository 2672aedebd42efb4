from __future__ import annotations

import numpy as np
import pytest

from toka_async.config import AuthConfig, LimitsConfig
from toka_async.openai.errors import ApiError
from toka_async.server.limits.account import Account, Cost
from toka_async.server.limits.accounts import Accounts
from toka_async.server.limits.fair_queue import find_full
from toka_async.server.limits.window import EngineLoad


def test_requests_and_tokens_of_one() -> None:
    account = Account("key alice", max_requests=2, max_tokens=100)
    account.take(Cost(1, 60))
    assert find_full(account, Cost(1, 41)) is account
    account.take(Cost(1, 40))
    assert find_full(account, Cost(1, 0)) is account
    assert "key alice: 2 requests with 100 tokens" in str(account.make_overload_error())
    assert "the limit is 2 requests and 100 tokens" in str(account.make_overload_error())
    account.give_back(Cost(2, 100))
    assert find_full(account, Cost(2, 100)) is None


@pytest.mark.parametrize(("num_requests", "num_tokens"), [(3, 1), (1, 101)])
def test_what_never_fits_is_the_request_s_fault(num_requests: int, num_tokens: int) -> None:
    parent = Account("this server", max_tokens=100)
    account = Account("key alice", max_requests=2, parents=(parent,))
    with pytest.raises(ApiError, match="the limit is") as caught:
        account.check_ever(Cost(num_requests, num_tokens))
    assert caught.value.status == 400
    assert account.most_tokens == 100


def test_a_parent_is_full() -> None:
    accounts = Accounts(LimitsConfig(max_held_tokens=100), AuthConfig(key_max_requests=5))
    alice, bob = accounts.open("alice"), accounts.open("bob", max_tokens=50)
    assert accounts.open("alice") is alice
    assert (alice.max_requests, alice.max_tokens, bob.max_requests, bob.max_tokens) == (5, 0, 5, 50)
    alice.take(Cost(1, 90))
    assert find_full(bob, Cost(1, 11)) is accounts.total
    num_fit, full = bob.find_fullest(np.asarray([5, 5, 5]))
    assert (num_fit, full) == (2, accounts.total)
    assert accounts.batches.most_tokens == 50


def test_lines_of_batches_count_in_their_owner_and_once_in_the_server() -> None:
    accounts = Accounts(LimitsConfig(max_held_tokens=100), AuthConfig())
    accounts.window.report(EngineLoad(10))
    alice = accounts.open("key alice", max_requests=3)
    lines = accounts.batches_of(alice)
    assert accounts.batches_of(alice) is lines
    lines.take(Cost(2, 40))
    for account in (lines, alice, accounts.batches, accounts.total):
        assert (account.num_requests, account.num_tokens) == (2, 40)
    assert find_full(lines, Cost(2, 1)) is alice
    assert find_full(lines, Cost(1, 11)) is accounts.batches
    assert find_full(alice, Cost(1, 60)) is None
    lines.give_back(Cost(2, 40))
    assert accounts.total.num_tokens == 0


def test_only_prompts_of_equal_salt_are_shared() -> None:
    accounts = Accounts(LimitsConfig(), AuthConfig())
    alice, bob = (accounts.open(f"key {name}", cache_owner=name) for name in ("alice", "bob"))
    lines = accounts.batches_of(alice)
    assert accounts.salt_of(accounts.total, "") == 0
    salts = [
        accounts.salt_of(*pair) for pair in ((alice, ""), (bob, ""), (alice, "x"), (bob, "x"), (accounts.total, "x"))
    ]
    assert len(set(salts)) == 5
    assert all(0 < salt < 2**63 for salt in salts)
    assert accounts.salt_of(lines, "") == salts[0]
    assert accounts.salt_of(lines, "x") == salts[2]
    assert Accounts(LimitsConfig(), AuthConfig()).salt_of(alice, "") != salts[0], "nobody can work out another's salt"


def test_an_owner_and_a_salt_are_not_another_owner() -> None:
    accounts = Accounts(LimitsConfig(), AuthConfig())
    short, long = (accounts.open(f"key {name}", cache_owner=name) for name in ("a", "ab"))
    assert accounts.salt_of(short, "bc") != accounts.salt_of(long, "c")


def test_keys_share_on_purpose() -> None:
    accounts = Accounts(LimitsConfig(), AuthConfig(share_cache=True))
    alice, bob = (accounts.open(f"key {name}", cache_owner=name) for name in ("alice", "bob"))
    assert accounts.salt_of(alice, "") == accounts.salt_of(bob, "") == 0
    assert accounts.salt_of(alice, "x") == accounts.salt_of(bob, "x") != 0
