"""Who waits for room: in order within an account, in turn between accounts, those of batches behind all others.

Nobody waits for ever: where the next in turn does not fit into what several accounts share, nobody goes before it. Work
per event. Knows accounts only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from toka_async.openai.errors import ApiError
from toka_async.server.limits.account import Account


@dataclass(frozen=True, slots=True, eq=False)
class WaitingRequest:
    """What there is no room for yet."""

    num_requests: int
    num_tokens: int
    future: asyncio.Future[None]


class Turns:
    """Of all accounts of one server."""

    def __init__(self) -> None:
        self._waiting: dict[Account, deque[WaitingRequest]] = {}  # in the order of their turns
        self._empty: dict[Account, asyncio.Future[None]] = {}  # where somebody wants to know
        self._needed: tuple[set[Account], set[Account]] = (set(), set())  # shared, awaited by one at the front, behind

    async def enter(self, account: Account, num_requests: int, num_tokens: int, num_samples: int = 1) -> None:
        """Takes room, for `Account.give_back` to give back; waits for it where the accounts allow that.

        Raises:
            ApiError: 400, there never will be so much.
            OverloadedError: there is none now, and as many wait as may.
        """
        account.check_ever(num_requests, num_tokens)
        full = account.lacking(num_requests, num_tokens)
        if full is None and self.is_open(account):
            account.take(num_requests, num_tokens)
            return
        if not account.can_wait(num_requests):
            account.refuse(num_requests)
            raise (full or account).is_full()
        await self._wait(account, num_requests, num_tokens, num_samples)

    def is_open(self, account: Account) -> bool:
        """Whether one that comes now would overtake nobody."""
        return not any(each in self._waiting or self._is_needed(each, account) for each in account.lineage)

    async def gone(self, account: Account) -> None:
        """Waits until nobody of the account waits."""
        while account in self._waiting:
            if account not in self._empty:
                self._empty[account] = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._empty[account])

    async def _wait(self, account: Account, num_requests: int, num_tokens: int, num_samples: int) -> None:
        waiting = WaitingRequest(num_requests, num_tokens, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(account, deque()).append(waiting)
        account.wait(num_requests)
        self.let_in()  # notes what it needs, so that nobody who comes later takes that
        try:
            with account.while_waiting(num_samples):
                await waiting.future
        except asyncio.CancelledError:
            if waiting.future.cancelled():
                self._forget(account, waiting)
            else:  # it had got its room
                account.give_back(num_requests, num_tokens)
            raise

    def _forget(self, account: Account, waiting: WaitingRequest) -> None:
        """It has left without entering: others may fit now."""
        self._waiting[account].remove(waiting)
        self._leave(account, waiting)
        self.let_in()

    def let_in(self) -> None:
        """There may be more room: whoever fits enters."""
        for is_behind, needed in enumerate(self._needed):
            needed.clear()
            turns = deque(account for account in self._waiting if account.is_behind == is_behind)
            while turns:
                account = turns.popleft()
                if self._let_in(account, needed) and account in self._waiting:
                    turns.append(account)

    def _let_in(self, account: Account, needed: set[Account]) -> bool:
        """Whether the first of the account waits no more."""
        if self._is_behind_others(account) or self._waiting[account][0].future.cancelled():  # it is about to leave
            return False
        line = self._waiting[account]
        first = line[0]
        if self._can_never_enter(account, first):
            return True
        full = account.lacking(first.num_requests, first.num_tokens)
        if full is not None:
            if full is not account:
                needed.add(full)
            return False
        line.popleft()
        account.take(first.num_requests, first.num_tokens)
        first.future.set_result(None)
        self._leave(account, first)
        if line:
            self._waiting[account] = self._waiting.pop(account)  # its next turn is after all others'
        return True

    def _can_never_enter(self, account: Account, waiting: WaitingRequest) -> bool:
        """Its limits are lower than they were: it is refused."""
        try:
            account.check_ever(waiting.num_requests, waiting.num_tokens)
        except ApiError as error:
            self._waiting[account].popleft()
            waiting.future.set_exception(error)
            self._leave(account, waiting)
            return True
        return False

    def _leave(self, account: Account, waiting: WaitingRequest) -> None:
        account.wait(-waiting.num_requests)
        if not self._waiting[account]:
            del self._waiting[account]
            if future := self._empty.pop(account, None):
                future.set_result(None)

    def check(self) -> None:
        """For tests, after every event: whoever waits has a reason to, and is counted."""
        for account, line in self._waiting.items():
            assert line, account.owner
            assert not self._let_in_next(account), account.owner
            if account.is_behind:
                assert account.num_waiting == sum(each.num_requests for each in line)

    def _let_in_next(self, account: Account) -> bool:
        """Whether the first of the account could enter."""
        first = self._waiting[account][0]
        assert not first.future.done()
        return not self._is_behind_others(account) and account.lacking(first.num_requests, first.num_tokens) is None

    def _is_behind_others(self, account: Account) -> bool:
        """Somebody waits before it, in an account that it counts in or for what it shares."""
        return any(
            (each is not account and each in self._waiting) or self._is_needed(each, account)
            for each in account.lineage
        )

    def _is_needed(self, shared: Account, account: Account) -> bool:
        """Whether somebody who goes before the account waits for what is shared."""
        return shared in self._needed[0] or (account.is_behind and shared in self._needed[1])
