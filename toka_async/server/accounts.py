"""How many requests and tokens somebody has in the engine, and how many they may have.

Tokens are those of prompts and the most that may be generated after them, from submission to the end. Knows no keys, no
HTTP and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import Int64
from toka_async.config import ServerConfig
from toka_async.openai.errors import ApiError, bad_request
from toka_async.server.jobs import OverloadedError

UNLIMITED = 2**62


def do_nothing(*_: object) -> None:
    """Nobody wants to know."""


@dataclass(slots=True, eq=False)
class Account:
    """One owner's share.

    owner: for messages. max_requests, max_tokens: 0 for no limit. parent: an account that all of it counts in too.
    timeout: seconds that a request may take, 0 for any. on_room: called when something ended after something was
    refused. num_refused: requests, ever.
    """

    owner: str
    max_requests: int = 0
    max_tokens: int = 0
    parent: Account | None = None
    timeout: float = 0.0
    on_room: Callable[[], None] = do_nothing
    num_requests: int = 0
    num_tokens: int = 0
    num_refused: int = 0
    _is_wanted: bool = False

    @property
    def most_tokens(self) -> int:
        """That one request can ever have."""
        return min(each.max_tokens or UNLIMITED for each in self._lineage())

    @contextmanager
    def holding(self, num_requests: int, num_tokens: int) -> Iterator[None]:
        """Holds them for a while. Raises as `check` does."""
        self.check(num_requests, num_tokens)
        self.take(num_requests, num_tokens)
        try:
            yield
        finally:
            self.give_back(num_requests, num_tokens)

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Whether there is room.

        Raises:
            ApiError: 400, there never will be.
            OverloadedError: not now.
        """
        for account in self._lineage():
            if 0 < account.max_requests < num_requests or 0 < account.max_tokens < num_tokens:
                raise account.too_large(num_requests, num_tokens)
        for account in self._lineage():
            if account.num_fit(np.asarray([num_tokens]), num_requests) < 1:
                self.refuse(num_requests)
                raise account.is_full()

    def num_fit(self, tokens: Int64, requests_each: int = 1) -> int:
        """How many of requests with so many tokens there is room for, the first ones taken, parents not considered."""
        count = tokens.size
        if self.max_requests:
            count = min(count, max(0, self.max_requests - self.num_requests) // requests_each)
        if self.max_tokens:
            room = self.max_tokens - self.num_tokens
            count = min(count, int(np.searchsorted(np.cumsum(tokens), room, side="right")))
        return count

    def fullest(self, tokens: Int64) -> tuple[int, Account]:
        """The number that fit, parents considered, and the account that lets no more in."""
        return min(((each.num_fit(tokens), each) for each in self._lineage()), key=lambda pair: pair[0])

    def take(self, num_requests: int, num_tokens: int) -> None:
        """They are held from now on; it is the caller's to see that there is room."""
        for account in self._lineage():
            account.num_requests += num_requests
            account.num_tokens += num_tokens

    def give_back(self, num_requests: int, num_tokens: int) -> None:
        """They have ended."""
        for account in self._lineage():
            account.num_requests -= num_requests
            account.num_tokens -= num_tokens
            assert account.num_requests >= 0, account.owner
            assert account.num_tokens >= 0, account.owner
        for account in self._lineage():
            if account._is_wanted:
                account._is_wanted = False
                account.on_room()

    def refuse(self, num_requests: int) -> None:
        """There is no room for so many."""
        for account in self._lineage():
            account.num_refused += num_requests
            account._is_wanted = True

    def is_full(self) -> OverloadedError:
        """Why something is refused now."""
        return OverloadedError(
            f"{self.owner}: {self.num_requests} requests with {self.num_tokens} tokens (max_tokens included) are held; "
            f"{self._limits()}"
        )

    def too_large(self, num_requests: int, num_tokens: int) -> ApiError:
        """Why something is refused for ever."""
        return bad_request(
            f"{num_requests} prompts with {num_tokens} tokens (n x max_tokens included) are too many; "
            f"{self.owner}: {self._limits()}",
            param="max_tokens",
        )

    def _limits(self) -> str:
        limits = ((self.max_requests, "requests"), (self.max_tokens, "tokens"))
        return "the limit is " + " and ".join(f"{most} {what}" for most, what in limits if most)

    def _lineage(self) -> Iterator[Account]:
        account: Account | None = self
        while account is not None:
            yield account
            account = account.parent


@dataclass(slots=True)
class Accounts:
    """All of one server. total: counts everything. batches: lines of batches, which leave half to connections."""

    config: ServerConfig
    total: Account = field(init=False)
    batches: Account = field(init=False)
    by_name: dict[str, Account] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        most = config.max_held_tokens
        self.total = Account("this server", max_tokens=most, timeout=config.request_timeout)
        self.batches = Account("lines of batches", max_tokens=(most + 1) // 2, parent=self.total)

    def open(self, name: str, max_requests: int | None = None, max_tokens: int | None = None) -> Account:
        """The account of that name, with limits of its own or the configured ones when it is new."""
        if name not in self.by_name:
            self.by_name[name] = Account(
                name,
                self.config.key_max_requests if max_requests is None else max_requests,
                self.config.key_max_held_tokens if max_tokens is None else max_tokens,
                self.total,
                self.config.request_timeout,
            )
        return self.by_name[name]
