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
from toka_async.batches.work import LineRequest, TryLaterError


@dataclass
class FakeQuestion:
    """Asked when the test opens the gate."""

    answers: FakeAnswers
    custom_id: str
    body: dict[str, Any]

    @property
    def cost(self) -> int:
        return int(self.body.get("n", 1))

    async def answer(self) -> Answered:
        answers = self.answers
        answers.num_running += 1
        answers.most_running = max(answers.most_running, answers.num_running)
        try:
            await answers.gate.wait()
            await asyncio.sleep(self.body.get("seconds", 0))
            if self.body.get("stops", 0) > answers.stops[self.custom_id]:
                answers.stops[self.custom_id] += 1
                raise TryLaterError("the engine is gone", stopped=True)
        finally:
            answers.num_running -= 1
        answers.asked[self.custom_id] += 1
        return Answered(self.custom_id, 200, b'{"text":"%d"}' % len(self.custom_id), None, 3, 2, 1)


@dataclass
class FakeAnswers:
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    num_running: int = 0
    most_running: int = 0

    async def question(self, record: BatchRecord, raw: bytes) -> LineRequest | Answered:
        custom_id = read_custom_id(raw)
        line = json.loads(raw)
        if line.get("url") != record.endpoint:
            return Answered(custom_id, 400, b'{"error":{}}')
        if line.get("body", {}).get("breaks"):
            raise AssertionError("an error of this program")
        return FakeQuestion(self, custom_id, line.get("body", {}))
