"""The accounts of one server. Knows no keys: names of owners only."""

from __future__ import annotations

from dataclasses import dataclass, field

from toka_async.config import ServerConfig
from toka_async.server.account import Account
from toka_async.server.turns import Turns


@dataclass(slots=True)
class Accounts:
    """All of one server. total: counts everything. batches: lines of batches, which leave half to connections."""

    config: ServerConfig
    total: Account = field(init=False)
    batches: Account = field(init=False)
    turns: Turns = field(init=False, default_factory=Turns)
    by_name: dict[str, Account] = field(default_factory=dict)

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
    ) -> Account:
        """The account of that name, from now on with these limits; None: the configured ones."""
        config = self.config
        requests = config.key_max_requests if max_requests is None else max_requests
        tokens = config.key_max_held_tokens if max_tokens is None else max_tokens
        waiting = (config.key_max_waiting if max_waiting is None else max_waiting) or None
        account = self.by_name.get(name)
        if account is None:
            timeout = config.request_timeout
            account = self.by_name[name] = self._account(
                name, requests, tokens, self.total, timeout=timeout, max_waiting=waiting
            )
        elif (account.max_requests, account.max_tokens, account.max_waiting) != (requests, tokens, waiting):
            account.max_requests, account.max_tokens, account.max_waiting = requests, tokens, waiting
            self.turns.let_in()
        return account

    def batches_of(self, account: Account) -> Account:
        """What the lines of an owner's batches count in: the limits of the owner, and those of all batches."""
        name = f"batches of {account.owner}"
        if name not in self.by_name:
            self.by_name[name] = self._account(name, 0, 0, account, self.batches, is_behind=True)
            self.by_name[name].while_waiting = self.batches.while_waiting
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
