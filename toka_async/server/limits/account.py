"""How many requests and tokens an owner has in the engine, and how many it may have.

Tokens are those of prompts and the most that may be generated after them, from submission to the end. An account knows
no keys, no HTTP and no engine, and nothing of how requests wait for room (`fair_queue`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from toka_async.arrays import Int64
from toka_async.openai.errors import ApiError, bad_request
from toka_async.server.limits.fair_queue import FairQueue, QueueOwner
from toka_async.server.limits.jobs import OverloadedError

UNLIMITED = 2**62


class Cost(NamedTuple):
    """A request's cost: prompts, their tokens with all that may follow them, and samples."""

    requests: int
    tokens: int
    samples: int = 0


@dataclass(slots=True, eq=False)
class Account(QueueOwner[Cost]):
    """One owner's share, and a limit that other accounts may count in.

    owner: for messages. max_requests, max_tokens: 0 for no limit. parents: accounts that all of it counts in too.
    timeout: seconds that a request may take, 0 for any. max_waiting: requests that may wait for room, None for any
    number. queue: where its requests wait. num_refused: requests, ever. cache_owner: whose prompts its requests may
    find in the prefix cache; empty: those of requests without an owner. lineage: itself, its parents, and theirs, each
    once. limits: when given, what it counts in besides its lineage; then all of it.
    """

    owner: str
    max_requests: int = 0
    max_tokens: int = 0
    parents: tuple[Account, ...] = ()
    timeout: float = 0.0
    max_waiting: int | None = None
    queue: FairQueue[Cost] = field(default_factory=FairQueue)
    cache_owner: str = ""
    num_requests: int = 0
    num_tokens: int = 0
    num_waiting: int = 0
    num_refused: int = 0
    lineage: tuple[Account, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.lineage = tuple(dict.fromkeys((self, *(each for parent in self.parents for each in parent.lineage))))
        inherited = (each for parent in self.parents for each in parent.limits)
        self.limits = tuple(dict.fromkeys((*self.lineage, *inherited, *self.limits)))

    @property
    def most_tokens(self) -> int:
        """The tokens that one request can ever have."""
        return min(each.max_tokens or UNLIMITED for each in self.lineage)

    def check_ever(self, cost: Cost) -> None:
        """Raises ApiError (400) when there never will be room for so much."""
        for account in self.lineage:
            if 0 < account.max_requests < cost.requests or 0 < account.max_tokens < cost.tokens:
                raise account.make_size_error(cost.requests, cost.tokens)

    def fits(self, cost: Cost) -> bool:
        """Whether this account has room for so much now, parents not considered."""
        return not (
            0 < self.max_requests < self.num_requests + cost.requests
            or 0 < self.max_tokens < self.num_tokens + cost.tokens
        )

    def add(self, cost: Cost) -> None:
        self.num_requests += cost.requests
        self.num_tokens += cost.tokens

    def remove(self, cost: Cost) -> None:
        self.num_requests -= cost.requests
        self.num_tokens -= cost.tokens
        assert self.num_requests >= 0, self.owner
        assert self.num_tokens >= 0, self.owner

    def count_fitting(self, tokens: Int64) -> int:
        """Counts the first requests with these tokens [r] for which this account has room, parents not considered."""
        count = tokens.size
        if self.max_requests:
            count = min(count, max(0, self.max_requests - self.num_requests))
        if self.max_tokens:
            room = self.max_tokens - self.num_tokens
            count = min(count, int(np.searchsorted(np.cumsum(tokens), room, side="right")))
        return count

    def find_fullest(self, tokens: Int64) -> tuple[int, Account]:
        """Counts the first requests that fit, parents considered; also returns the account that lets no more in."""
        return min(((each.count_fitting(tokens), each) for each in self.lineage), key=lambda pair: pair[0])

    def take(self, cost: Cost) -> None:
        """Counts requests that are held from now on; it is the caller's to see that there is room."""
        self.queue.take(self, cost)

    def give_back(self, cost: Cost) -> None:
        """Requests have ended."""
        self.queue.leave(self, cost)

    def refuse(self, num_requests: int) -> None:
        """Counts requests for which there is no room."""
        for account in self.lineage:
            account.num_refused += num_requests

    def can_wait(self, num_requests: int) -> bool:
        """Whether so many more may wait for room. Of requests that are behind all others any number may."""
        if self.is_behind:
            return True
        most = ((each.num_waiting, each.max_waiting) for each in self.lineage)
        return all(limit is None or waiting + num_requests <= limit for waiting, limit in most)

    def count_waiting(self, cost: Cost, change: int) -> None:
        """Counts waiting requests; those that are behind all others keep no others from waiting."""
        for account in (self,) if self.is_behind else self.lineage:
            account.num_waiting += change * cost.requests
            assert account.num_waiting >= 0, account.owner

    def make_overload_error(self) -> OverloadedError:
        """Makes the error of a request that is refused now."""
        return OverloadedError(
            f"{self.owner}: {self.num_requests} requests with {self.num_tokens} tokens (max_tokens included) are held; "
            f"{self._limits()}"
        )

    def make_size_error(self, num_requests: int, num_tokens: int) -> ApiError:
        """Makes the error of a request that can never be admitted."""
        return bad_request(
            f"{num_requests} prompts with {num_tokens} tokens (n x max_tokens included) are too many; "
            f"{self.owner}: {self._limits()}",
            param="max_tokens",
        )

    def _limits(self) -> str:
        limits = ((self.max_requests, "requests"), (self.max_tokens, "tokens"))
        return "the limit is " + " and ".join(f"{most} {what}" for most, what in limits if most)
