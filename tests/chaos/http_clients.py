"""Clients over HTTP: whole answers and streams, some of whom leave. Every request has one end.

A broken connection is an end only where the front end was made to end meanwhile, or the client hung up itself.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import aiohttp

from tests.chaos.questions import Question, Questions, Sample, whole_answer
from tests.chaos.service import Service
from tests.chaos.tally import REFUSED, Item, Tally

HANG = 60.0  # seconds after which a request without an end is lost
PAUSE = 0.05  # after a refusal
PAUSED = (REFUSED, "broken with the front end")
LEAVING, LONG, WRONG, STREAMED, SLOW = 0.15, 0.02, 0.03, 0.5, 0.1  # shares of requests
EXPECTED = {"engine_stopped": "engine stopped", "timeout": "timed out", "overloaded": "overloaded"}


class HttpClient:
    """Asks one request after the other until it is told to stop."""

    def __init__(self, service: Service, questions: Questions, tally: Tally, draw: random.Random) -> None:
        self._service = service
        self._questions = questions
        self._tally = tally
        self._draw = draw
        self._http: aiohttp.ClientSession

    async def run(self, stop: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as self._http:
            while not stop.is_set():
                await self._service.up.wait()
                await self._ask_one()

    async def _ask_one(self) -> None:
        chance, streamed = self._draw.random(), self._draw.random() < STREAMED
        if chance < WRONG:
            await self._refused()
            return
        which = self._questions.long if chance < WRONG + LONG else self._questions.answerable
        question = self._draw.choice(which)
        leaves = self._draw.random() < LEAVING
        with self._tally.item("http stream" if streamed else "http") as item:
            await self._watched(item, self._stream(item, question) if streamed else self._whole(item, question), leaves)
        if item.outcome in PAUSED:
            await asyncio.sleep(PAUSE)

    async def _watched(self, item: Item, asking: Awaitable[None], leaves: bool) -> None:
        """Ends the item whatever comes of it."""
        ends, doomed = self._service.num_ends, self._service.is_doomed
        patience = self._draw.expovariate(10) if leaves else HANG
        try:
            async with asyncio.timeout(patience):
                await asking
        except TimeoutError:
            if leaves:
                item.end("left")
            else:
                item.wrong(f"no end after {HANG:g} s")
        except (aiohttp.ClientError, OSError) as error:
            if doomed or self._service.is_doomed or self._service.num_ends != ends:
                item.end("broken with the front end")
            else:
                item.wrong(f"the connection broke: {error!r}")

    async def _refused(self) -> None:
        with self._tally.item("http wrong") as item:
            await self._watched(item, self._wrong(item), leaves=False)

    async def _wrong(self, item: Item) -> None:
        body = {"prompt": "x", "temperature": 99}
        async with self._http.post(f"{self._service.url}/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status == 400 and answer["error"]["param"] == "temperature":
                item.end("refused")
            else:
                item.wrong(f"{response.status} {answer}")

    async def _whole(self, item: Item, question: Question) -> None:
        async with self._http.post(f"{self._service.url}/v1/completions", json=question.body) as response:
            answer = await response.json()
        if response.status != 200:
            self._failed(item, response.status, answer)
        elif not question.right:
            item.wrong("in time, although it takes too long")
        elif fault := question.fault(whole_answer(answer)):
            item.wrong(fault)
        else:
            item.end("right")

    async def _stream(self, item: Item, question: Question) -> None:
        body = {**question.body, "stream": True}
        async with self._http.post(f"{self._service.url}/v1/completions", json=body) as response:
            if response.status != 200:
                self._failed(item, response.status, await response.json())
                return
            lines = [line async for line in self._lines(response)]
        events = [line.removeprefix(b"data: ").strip() for line in lines if line.startswith(b"data: ")]
        if events and events[-1] == b"[DONE]":
            fault = question.fault(streamed_answer([json.loads(event) for event in events[:-1]], question.num_samples))
            item.end("right") if fault is None else item.wrong(fault)
        elif events and "error" in (last := json.loads(events[-1])):
            self._failed(item, 200, last)
        else:
            item.wrong(f"the stream ended after {len(events)} events")

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Now and then with pauses: the server has to wait for its reader."""
        is_slow = self._draw.random() < SLOW
        async for line in response.content:
            yield line
            if is_slow and self._draw.random() < 0.1:
                await asyncio.sleep(0.1)

    def _failed(self, item: Item, status: int, answer: dict[str, Any]) -> None:
        code = answer["error"]["code"]
        if status == 503:
            item.end(REFUSED)
        elif code in EXPECTED:
            item.end(EXPECTED[code])
        else:
            item.wrong(f"{status} {answer}")


def streamed_answer(events: list[dict[str, Any]], n: int) -> list[Sample]:
    """The samples of a stream; one that ended not exactly once has a reason that none has."""
    texts: defaultdict[int, str] = defaultdict(str)
    reasons: defaultdict[int, list[str]] = defaultdict(list)
    ids: defaultdict[int, list[int]] = defaultdict(list)
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] += choice["text"]
            ids[index] += choice["token_ids"]
            if choice["finish_reason"] is not None:
                reasons[index].append(choice["finish_reason"])
    return [Sample(texts[index], tuple(ids[index]), " and ".join(reasons[index])) for index in range(n)]
