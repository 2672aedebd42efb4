"""Answers without an engine: a line's body says what becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from toka_async.batches.lines import read_custom_id
from toka_async.batches.records import BatchRecord
from toka_async.batches.results import Answered
from toka_async.batches.work import LineRequest
from toka_async.config import AuthConfig, LimitsConfig
from toka_async.server.limits.account import Account, Cost
from toka_async.server.limits.accounts import Accounts


@dataclass
class FakeLine:
    """Answered when the test opens the gate."""

    answers: FakeAnswers
    account: Account
    custom_id: str
    body: dict[str, Any]
    is_in: bool = False

    @property
    def cost(self) -> Cost:
        return Cost(1, 0, int(self.body.get("n", 1)))

    async def enter(self) -> None:
        await self.answers.accounts.enter(self.account, self.cost)
        self.is_in = True

    def leave(self) -> None:
        assert self.is_in
        self.account.give_back(self.cost)

    async def answer(self) -> Answered:
        answers = self.answers
        answers.num_running += 1
        answers.most_running = max(answers.most_running, answers.num_running)
        try:
            await answers.gate.wait()
            await asyncio.sleep(self.body.get("seconds", 0))
        finally:
            answers.num_running -= 1
        answers.asked[self.custom_id] += 1
        return Answered(self.custom_id, 200, b'{"text":"%d"}' % len(self.custom_id), None, 3, 2, 1)


@dataclass
class FakeAnswers:
    """Lines wait for room in accounts; nothing else of an engine is there."""

    accounts: Accounts = field(default_factory=lambda: Accounts(LimitsConfig(), AuthConfig()))
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: Counter[str] = field(default_factory=Counter)
    num_running: int = 0
    most_running: int = 0

    async def prepare(self, record: BatchRecord, raw: bytes) -> LineRequest | Answered:
        custom_id = read_custom_id(raw)
        line = json.loads(raw)
        if line.get("url") != record.endpoint:
            return Answered(custom_id, 400, b'{"error":{}}')
        if line.get("body", {}).get("breaks"):
            raise AssertionError("an error of this program")
        account = self.accounts.batches_of(self.accounts.open(record.owner))
        return FakeLine(self, account, custom_id, line.get("body", {}))
