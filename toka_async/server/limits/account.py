"""How many requests and tokens somebody has in the engine, and how many they may have.

Tokens are those of prompts and the most that may be generated after them, from submission to the end. Knows no keys, no
HTTP and no engine, and nothing of how one waits for room (`turns`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import Int64
from toka_async.openai.errors import ApiError, bad_request
from toka_async.server.limits.jobs import OverloadedError

UNLIMITED = 2**62


def do_nothing(*_: object) -> None:
    """Nobody wants to know."""


def as_before(_num_samples: int) -> AbstractContextManager[None]:
    """Nothing is different meanwhile."""
    return nullcontext()


@dataclass(slots=True, eq=False)
class Account:
    """One owner's share.

    owner: for messages. max_requests, max_tokens: 0 for no limit. parents: accounts that all of it counts in too.
    timeout: seconds that a request may take, 0 for any. max_waiting: requests that may wait for room, None for any
    number. is_behind: its requests let those of all other accounts go first. while_waiting: entered with the number of
    its samples while a request waits for room. on_room: called when something has ended. num_refused: requests, ever.
    cache_owner: whose prompts its requests may find in the prefix cache; empty: those of requests without an owner.
    lineage: itself, its parents, and theirs, each once.
    """

    owner: str
    max_requests: int = 0
    max_tokens: int = 0
    parents: tuple[Account, ...] = ()
    timeout: float = 0.0
    max_waiting: int | None = None
    is_behind: bool = False
    while_waiting: Callable[[int], AbstractContextManager[None]] = as_before
    on_room: Callable[[], None] = do_nothing
    cache_owner: str = ""
    num_requests: int = 0
    num_tokens: int = 0
    num_waiting: int = 0
    num_refused: int = 0
    lineage: tuple[Account, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.lineage = tuple(dict.fromkeys((self, *(each for parent in self.parents for each in parent.lineage))))

    @property
    def most_tokens(self) -> int:
        """That one request can ever have."""
        return min(each.max_tokens or UNLIMITED for each in self.lineage)

    def check_ever(self, num_requests: int, num_tokens: int) -> None:
        """Raises ApiError (400) when there never will be room for so much."""
        for account in self.lineage:
            if 0 < account.max_requests < num_requests or 0 < account.max_tokens < num_tokens:
                raise account.too_large(num_requests, num_tokens)

    def lacking(self, num_requests: int, num_tokens: int) -> Account | None:
        """The first of its lineage without room for so much now."""
        for each in self.lineage:
            if 0 < each.max_requests < each.num_requests + num_requests:
                return each
            if 0 < each.max_tokens < each.num_tokens + num_tokens:
                return each
        return None

    def num_fit(self, tokens: Int64) -> int:
        """How many of requests with so many tokens there is room for, the first ones taken, parents not considered."""
        count = tokens.size
        if self.max_requests:
            count = min(count, max(0, self.max_requests - self.num_requests))
        if self.max_tokens:
            room = self.max_tokens - self.num_tokens
            count = min(count, int(np.searchsorted(np.cumsum(tokens), room, side="right")))
        return count

    def fullest(self, tokens: Int64) -> tuple[int, Account]:
        """The number that fit, parents considered, and the account that lets no more in."""
        return min(((each.num_fit(tokens), each) for each in self.lineage), key=lambda pair: pair[0])

    def take(self, num_requests: int, num_tokens: int) -> None:
        """They are held from now on; it is the caller's to see that there is room."""
        for account in self.lineage:
            account.num_requests += num_requests
            account.num_tokens += num_tokens

    def give_back(self, num_requests: int, num_tokens: int) -> None:
        """They have ended."""
        for account in self.lineage:
            account.num_requests -= num_requests
            account.num_tokens -= num_tokens
            assert account.num_requests >= 0, account.owner
            assert account.num_tokens >= 0, account.owner
        self.on_room()

    def refuse(self, num_requests: int) -> None:
        """There is no room for so many."""
        for account in self.lineage:
            account.num_refused += num_requests

    def can_wait(self, num_requests: int) -> bool:
        """Whether so many may wait for room besides those that do. Of those behind all others any number may."""
        if self.is_behind:
            return True
        most = ((each.num_waiting, each.max_waiting) for each in self.lineage)
        return all(limit is None or waiting + num_requests <= limit for waiting, limit in most)

    def wait(self, num_requests: int) -> None:
        """So many more wait; fewer when it is negative. Those that are behind all others are not in their way."""
        for account in (self,) if self.is_behind else self.lineage:
            account.num_waiting += num_requests
            assert account.num_waiting >= 0, account.owner

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
