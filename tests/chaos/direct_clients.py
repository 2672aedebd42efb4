"""Clients of direct submission: many requests at once over one session, connections that break, clients that vanish.

Every request ends once, whatever is submitted again: what comes over the wire is counted too, below the client.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from tests.chaos.questions import Question, Questions, Sample
from tests.chaos.service import Service
from tests.chaos.tally import Item, Tally
from tests.processes.cuttable import Cuttable
from toka_async.client import Client, ConnectionLostError, RequestError
from toka_async.client.connection import ClientConnection
from toka_async.client.results import Result
from toka_async.protocol import Results, Welcome, from_server
from toka_async.transport.zmq_frames import Frame

HANG = 90.0  # seconds after which a request without an end is lost: servers that start again included
AT_ONCE = 12
LAST_WORDS = 0.05  # seconds for a client's goodbye to get through the proxy
CANCELLED, LONG, WRONG, STREAMED, MANY = 0.12, 0.02, 0.03, 0.3, 0.2  # shares of requests
VANISHING = 0.4  # share of sessions that end without a word
EXPECTED = {"engine_stopped": "engine stopped", "timeout": "timed out"}


class WatchedConnection(ClientConnection):
    """Counts the ends of samples that the server says, below what the client makes of them."""

    tally: Tally

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._last = 0
        self._ended: set[tuple[int, int]] = set()

    def _on_frames(self, frames: list[Frame]) -> None:
        header, columns = from_server(frames)
        if isinstance(header, Welcome) and not header.resumed:
            self._last = 0
            self._ended.clear()
        elif isinstance(header, Results) and header.seq > self._last:
            self._last = header.seq
            rows = zip(*(columns[name].tolist() for name in ("ids", "samples", "reasons")), strict=True)
            for key, sample, reason in rows:
                if (key, sample) in self._ended:
                    self.tally.fault(f"zmq: sample {sample} of request {key} goes on after its end")
                if reason:
                    self._ended.add((key, sample))
        super()._on_frames(frames)


class WatchedClient(Client):
    def __init__(self, url: str, tally: Tally) -> None:
        super().__init__(url, timeout=HANG)
        self._tally = tally

    def _make_connection(self, kind: type[ClientConnection]) -> ClientConnection:
        del kind
        self._watched = super()._make_connection(WatchedConnection)
        assert isinstance(self._watched, WatchedConnection)
        self._watched.tally = self._tally
        return self._watched

    def vanish(self) -> None:
        """As if the process were killed: the server hears nothing."""
        self._watched.close()


class DirectClient:
    """One session after the other, each of many requests, until it is told to stop."""

    def __init__(
        self, service: Service, questions: Questions, tally: Tally, draw: random.Random, *, is_calm: bool = False
    ) -> None:
        self._vanishing = 0.0 if is_calm else VANISHING
        self._service = service
        self._questions = questions
        self._tally = tally
        self._draw = draw

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._service.up.wait()
            with self._tally.item("zmq session") as item:
                try:
                    async with Cuttable(self._service.zmq_url) as proxy:
                        await self._session(proxy, stop)
                        await asyncio.sleep(LAST_WORDS)
                except ConnectionLostError as error:
                    item.wrong(f"no connection: {error}")
                    await asyncio.sleep(1.0)
                else:
                    item.end("over")

    async def _session(self, proxy: Cuttable, stop: asyncio.Event) -> None:
        until = asyncio.get_running_loop().time() + self._draw.uniform(1, 8)
        async with WatchedClient(proxy.url, self._tally) as client:
            cutting = asyncio.create_task(self._cut(proxy))
            vanishes = self._draw.random() < self._vanishing
            askers = [asyncio.create_task(self._ask_on(client, until, stop)) for _ in range(AT_ONCE)]
            if vanishes:
                await asyncio.sleep(self._draw.uniform(0.1, 3))
                client.vanish()
                for asker in askers:
                    asker.cancel()
                await asyncio.gather(*askers, return_exceptions=True)
            else:
                await asyncio.gather(*askers)
            cutting.cancel()
            await asyncio.gather(cutting, return_exceptions=True)

    async def _cut(self, proxy: Cuttable) -> None:
        while True:
            await asyncio.sleep(self._draw.expovariate(0.7))
            self._tally.kills["zmq connection cut"] += 1
            proxy.cut()

    async def _ask_on(self, client: WatchedClient, until: float, stop: asyncio.Event) -> None:
        while not stop.is_set() and asyncio.get_running_loop().time() < until:
            await self._ask_one(client)

    async def _ask_one(self, client: WatchedClient) -> None:
        chance, kind = self._draw.random(), self._draw.random()
        if chance < WRONG:
            await self._ask(client, "zmq wrong", self._wrong, None)
            return
        which = self._questions.long if chance < WRONG + LONG else self._questions.short
        question = self._draw.choice(which)
        if kind < STREAMED:
            await self._ask(client, "zmq stream", self._stream, question)
        elif kind < STREAMED + MANY:
            await self._ask(client, "zmq many", self._many, question)
        else:
            await self._ask(client, "zmq", self._whole, question)

    async def _ask(
        self, client: Client, kind: str, asking: Callable[[Client, Any], Awaitable[str | None]], question: Any
    ) -> None:
        with self._tally.item(kind) as item:
            ends = self._service.num_ends
            patience = self._draw.expovariate(10) if self._draw.random() < CANCELLED else HANG
            try:
                async with asyncio.timeout(patience):
                    fault = await asking(client, question)
                item.end("right") if fault is None else item.wrong(fault)
            except TimeoutError:
                item.end("cancelled") if patience < HANG else item.wrong(f"no end after {HANG:g} s")
            except asyncio.CancelledError:
                item.end("client vanished")
                raise
            except RequestError as error:
                refused(item, error)
            except ConnectionLostError as error:
                if "forgotten" in str(error) and self._service.num_ends != ends:
                    item.end("broken with the front end")
                else:
                    item.wrong(f"{error}")

    async def _wrong(self, client: Client, _question: None) -> str | None:
        try:
            await client.generate([1], temperature=99)
        except RequestError as error:
            return None if error.field == "temperature" else f"{error}"
        return "it was taken"

    async def _whole(self, client: Client, question: Question) -> str | None:
        text = not question.in_columns or self._draw.random() < 0.5
        return fault_of(question, await client.generate(question.text_or_ids, **fields_of(question, text)), text)

    async def _many(self, client: Client, question: Question) -> str | None:
        text = not question.in_columns
        fields = fields_of(question, text)
        seed = fields.pop("seed")
        count = self._draw.randrange(1, 6)
        results = await client.generate_many([question.text_or_ids] * count, seeds=[seed] * count, **fields)
        faults = (fault_of(question, result, text) for result in results)
        return next((fault for fault in faults if fault is not None), None)

    async def _stream(self, client: Client, question: Question) -> str | None:
        text = not question.in_columns or self._draw.random() < 0.5
        texts, reasons = [""] * question.num_samples, [""] * question.num_samples
        ids: list[list[int]] = [[] for _ in range(question.num_samples)]
        async for event in client.stream(question.text_or_ids, **fields_of(question, text)):
            texts[event.sample] += event.text or ""
            ids[event.sample] += event.token_ids.tolist()
            reasons[event.sample] += event.finish_reason or ""
        samples = zip(texts, map(tuple, ids), reasons, strict=True)
        return question.fault(as_told(question, [Sample(*sample) for sample in samples], text))


def refused(item: Item, error: RequestError) -> None:
    if error.code in EXPECTED:
        item.end(EXPECTED[error.code])
    else:
        item.wrong(f"{error.status} {error.code} {error}")


def fields_of(question: Question, text: bool) -> Any:
    return {**question.fields, "text": text}


def as_told(question: Question, samples: list[Sample], text: bool) -> list[Sample]:
    """Without text there is nothing to compare it with."""
    if text or not question.right:
        return samples
    return [
        Sample(right.text, sample.token_ids, sample.reason)
        for sample, right in zip(samples, question.right, strict=True)
    ]


def fault_of(question: Question, result: Result, text: bool) -> str | None:
    samples = [
        Sample(sample.text or "", tuple(sample.token_ids.tolist()), sample.finish_reason or "none")
        for sample in result.samples
    ]
    return question.fault(as_told(question, samples, text))
