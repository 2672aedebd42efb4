"""The accounts of one server. Knows no keys: names of owners only."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from hashlib import blake2b

from toka_async.config import AuthConfig, LimitsConfig
from toka_async.server.limits.account import Account
from toka_async.server.limits.turns import Turns


@dataclass(slots=True)
class Accounts:
    """All of one server. total: counts everything. batches: lines of batches, which leave half to connections."""

    config: LimitsConfig
    auth: AuthConfig
    total: Account = field(init=False)
    batches: Account = field(init=False)
    turns: Turns = field(init=False, default_factory=Turns)
    by_name: dict[str, Account] = field(default_factory=dict)
    _secret: bytes = field(init=False, repr=False, default_factory=lambda: secrets.token_bytes(32))

    def __post_init__(self) -> None:
        config = self.config
        self.total = Account(
            "this server",
            config.max_requests,
            config.max_held_tokens,
            timeout=config.request_timeout,
            max_waiting=config.max_waiting,
            on_room=self.turns.let_in,
        )
        self.batches = self._account(
            "lines of batches", 0, (config.max_held_tokens + 1) // 2, self.total, is_behind=True
        )

    def open(
        self,
        name: str,
        max_requests: int | None = None,
        max_tokens: int | None = None,
        max_waiting: int | None = None,
        cache_owner: str = "",
    ) -> Account:
        """The account of that name, from now on with these limits; None: the configured ones.

        cache_owner: see Account.
        """
        auth = self.auth
        requests = auth.key_max_requests if max_requests is None else max_requests
        tokens = auth.key_max_held_tokens if max_tokens is None else max_tokens
        waiting = (auth.key_max_waiting if max_waiting is None else max_waiting) or None
        account = self.by_name.get(name)
        if account is None:
            timeout = self.config.request_timeout
            account = self.by_name[name] = self._account(
                name, requests, tokens, self.total, timeout=timeout, max_waiting=waiting
            )
        elif (account.max_requests, account.max_tokens, account.max_waiting) != (requests, tokens, waiting):
            account.max_requests, account.max_tokens, account.max_waiting = requests, tokens, waiting
            self.turns.let_in()
        account.cache_owner = cache_owner
        return account

    def salt_of(self, account: Account, cache_salt: str) -> int:
        """Under which an account's prompts are cached: only requests of equal salt find each other's.

        0 is everybody's: without API keys, or where keys share on purpose, unless a request has a `cache_salt`. The
        secret keeps others from choosing a salt that meets somebody else's.
        """
        owner = "" if self.auth.share_cache else account.cache_owner
        if not owner and not cache_salt:
            return 0
        text = f"{len(owner)} {owner}{cache_salt}".encode("utf-8", "surrogatepass")
        digest = blake2b(text, digest_size=8, key=self._secret).digest()
        return max(1, int.from_bytes(digest, "little") >> 1)

    def batches_of(self, account: Account) -> Account:
        """What the lines of an owner's batches count in: the limits of the owner, and those of all batches."""
        name = f"batches of {account.owner}"
        if name not in self.by_name:
            self.by_name[name] = self._account(name, 0, 0, account, self.batches, is_behind=True)
            self.by_name[name].while_waiting = self.batches.while_waiting
        self.by_name[name].cache_owner = account.cache_owner
        return self.by_name[name]

    def _account(
        self,
        name: str,
        max_requests: int,
        max_tokens: int,
        *parents: Account,
        timeout: float = 0.0,
        max_waiting: int | None = None,
        is_behind: bool = False,
    ) -> Account:
        on_room = self.turns.let_in
        return Account(name, max_requests, max_tokens, parents, timeout, max_waiting, is_behind, on_room=on_room)
