"""The accounts of one server, and the admission of requests to the engine. Knows no keys: names of owners only."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from hashlib import blake2b

from toka_async.config import AuthConfig, LimitsConfig
from toka_async.server.limits.account import Account, Cost
from toka_async.server.limits.fair_queue import FairQueue
from toka_async.server.limits.window import Window


@dataclass(slots=True)
class Accounts:
    """All of one server.

    total: counts everything. batches: counts lines of batches, which leave half to connections. window: the samples of
    these. queue: what waits.
    """

    config: LimitsConfig
    auth: AuthConfig
    total: Account = field(init=False)
    batches: Account = field(init=False)
    window: Window = field(init=False)
    queue: FairQueue[Cost] = field(init=False, default_factory=FairQueue)
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
            queue=self.queue,
        )
        self.window = Window(max(1, config.max_requests // 2), self.queue.admit)
        most = (config.max_held_tokens + 1) // 2
        self.batches = Account(
            "lines of batches", 0, most, (self.total,), queue=self.queue, is_behind=True, limits=(self.window,)
        )

    def open(
        self,
        name: str,
        max_requests: int | None = None,
        max_tokens: int | None = None,
        max_waiting: int | None = None,
        cache_owner: str = "",
    ) -> Account:
        """Returns the account of that name, from now on with these limits; None: the configured ones.

        cache_owner: see Account.
        """
        auth = self.auth
        requests = auth.key_max_requests if max_requests is None else max_requests
        tokens = auth.key_max_held_tokens if max_tokens is None else max_tokens
        waiting = (auth.key_max_waiting if max_waiting is None else max_waiting) or None
        account = self.by_name.get(name)
        if account is None:
            account = self.by_name[name] = Account(
                name, requests, tokens, (self.total,), self.config.request_timeout, waiting, self.queue
            )
        elif (account.max_requests, account.max_tokens, account.max_waiting) != (requests, tokens, waiting):
            account.max_requests, account.max_tokens, account.max_waiting = requests, tokens, waiting
            self.queue.admit()
        account.cache_owner = cache_owner
        return account

    async def enter(self, account: Account, cost: Cost) -> None:
        """Takes room for requests, for `Account.give_back` to give back; waits for it where the accounts allow that.

        Raises:
            ApiError: 400, there never will be so much.
            OverloadedError: there is none now, and as many wait as may.
        """
        account.check_ever(cost)
        if not self.queue.can_enter(account, cost) and not account.can_wait(cost.requests):
            account.refuse(cost.requests)
            raise next((each for each in account.lineage if not each.fits(cost)), account).make_overload_error()
        await self.queue.enter(account, cost)

    def salt_of(self, account: Account, cache_salt: str) -> int:
        """Derives the salt of an account's prompts in the cache: only requests of equal salt find each other's.

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
        """Returns the account of an owner's batches: it has the limits of the owner, and those of all batches."""
        name = f"batches of {account.owner}"
        if name not in self.by_name:
            parents = (account, self.batches)
            self.by_name[name] = Account(name, parents=parents, queue=self.queue, is_behind=True)
        self.by_name[name].cache_owner = account.cache_owner
        return self.by_name[name]
