"""Requests on their way, and who waits for them: one result, many results together, or events as they come.

Knows no sockets and no protocol but the rows of results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from toka_async.arrays import Int32
from toka_async.client.errors import ConnectionLostError
from toka_async.client.results import FINISH, Event, PromptScores, Result, Row, Sample
from toka_async.protocol import ProtocolError

K = TypeVar("K")

STOP = 1  # messages.Reason: an end token


class RequestOptions:
    """What some requests have in common. encoded: their fields as the server gets them."""

    def __init__(self, fields: Mapping[str, Any], encoded: bytes, stream: bool) -> None:
        self.encoded = encoded
        self.stream = stream
        n = fields.get("n", 1)
        self.n = n if isinstance(n, int) else 1
        stops = fields.get("stop")
        self._stops = tuple(dict.fromkeys([stops] if isinstance(stops, str) else each_of(stops, str)))
        self._stop_token_ids = frozenset(each_of(fields.get("stop_token_ids"), int))

    def stop_of(self, row: Row) -> str | int | None:
        """What ended the sample, of what the request named. Raises ProtocolError for a string that it did not."""
        if row.stop >= 0:
            if row.stop >= len(self._stops):
                raise ProtocolError(f"request {row.id} has no stop string {row.stop}", "stops")
            return self._stops[row.stop]
        if row.reason == STOP and self._stop_token_ids and row.token_ids.size:
            last = int(row.token_ids[-1])
            return last if last in self._stop_token_ids else None
        return None


def each_of(values: Any, kind: type[K]) -> list[K]:
    """Those of a kind; what else a field holds is for the server to refuse."""
    return [value for value in values if isinstance(value, kind)] if isinstance(values, list | tuple) else []


News = Event | Result | Exception


class Waiter(Protocol):
    """Who waits for a request: for events of a streamed one, for the result of another, or for the error."""

    def tell(self, pending: Pending, news: News) -> None: ...


class Pending:
    """A request. `waiter` is None when nobody wants to know any more.

    is_sent: over this connection. may_run: the server may have it, also from a connection before.
    """

    __slots__ = (
        "has_begun",
        "id",
        "is_sent",
        "may_run",
        "num_open",
        "place",
        "prompt",
        "samples",
        "scores",
        "seed",
        "waiter",
        "wishes",
    )

    def __init__(
        self, key: int, prompt: Int32 | bytes, seed: int, wishes: RequestOptions, waiter: Waiter, place: int = 0
    ) -> None:
        self.id = key
        self.prompt = prompt
        self.seed = seed
        self.wishes = wishes
        self.waiter: Waiter | None = waiter
        self.place = place  # among those who wait together
        self.is_sent = self.may_run = False
        self.restart()

    def restart(self) -> None:
        """Nothing has come of it."""
        self.has_begun = False
        self.num_open = self.wishes.n
        self.samples: list[Sample | None] = []
        self.scores: PromptScores | None = None

    def take(self, row: Row) -> bool:
        """A row of it has come; True when it was the last. Raises ProtocolError for one that it cannot have."""
        reason, wishes = FINISH[row.reason], self.wishes
        if not 0 <= row.sample < max(1, wishes.n):
            raise ProtocolError(f"request {self.id} has no sample {row.sample}", "samples")
        if reason is None and not wishes.stream:
            raise ProtocolError(f"request {self.id} is not streamed, but has a sample that goes on", "reasons")
        self.has_begun = True
        stop = wishes.stop_of(row)
        self.num_open -= reason is not None
        parts = (row.token_ids, row.text, reason, stop, row.logprobs, row.top_ids, row.top_logprobs)
        if self.waiter is None:
            pass
        elif wishes.stream:
            self.waiter.tell(self, Event(*parts, sample=row.sample))
        elif wishes.n == 1:
            self.waiter.tell(self, Result([Sample(*parts)], row.cached, self.scores))
        else:
            self._keep(row.sample, Sample(*parts), row.cached)
        return not self.num_open

    def _keep(self, place: int, sample: Sample, cached: int) -> None:
        self.samples = self.samples or [None] * self.wishes.n
        if self.samples[place] is not None:
            raise ProtocolError(f"sample {place} of request {self.id} has ended twice", "samples")
        self.samples[place] = sample
        if not self.num_open and self.waiter is not None:
            samples = [each for each in self.samples if each is not None]
            self.waiter.tell(self, Result(samples, cached, self.scores))

    def fail(self, error: Exception) -> None:
        if self.waiter is not None:
            self.waiter.tell(self, error)


class OneResult:
    """Waits for one request."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def tell(self, pending: Pending, news: News) -> None:
        del pending
        if self.future.done():
            return
        if isinstance(news, Exception):
            self.future.set_exception(news)
        else:
            assert isinstance(news, Result)
            self.future.set_result(news)


class ManyResults:
    """Waits for many requests together; the first error is theirs all."""

    def __init__(self, count: int) -> None:
        self.future: asyncio.Future[list[Result]] = asyncio.get_running_loop().create_future()
        self._results: dict[int, Result] = {}
        self._count = count

    def tell(self, pending: Pending, news: News) -> None:
        if self.future.done():
            return
        if isinstance(news, Exception):
            self.future.set_exception(news)
            return
        assert isinstance(news, Result)
        self._results[pending.place] = news
        if len(self._results) == self._count:
            self.future.set_result([self._results[place] for place in range(self._count)])


class RequestEvents:
    """Waits for what a streamed request says."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[News] = asyncio.Queue()

    async def next(self) -> Event:
        """Raises RequestError or ConnectionLostError."""
        news = await self._queue.get()
        if isinstance(news, Exception):
            raise news
        assert isinstance(news, Event)
        return news

    def tell(self, pending: Pending, news: News) -> None:
        del pending
        self._queue.put_nowait(news)


def lost(pending: Pending) -> ConnectionLostError:
    """The error of a stream that cannot begin anew."""
    return ConnectionLostError(f"the server has forgotten stream {pending.id}, of which a part has come")


def submission_columns(pendings: Sequence[Pending]) -> dict[str, np.ndarray[Any, Any]]:
    """Of requests with the same wishes and the same kind of prompt."""
    prompts = [pending.prompt for pending in pendings]
    columns: dict[str, np.ndarray[Any, Any]] = {
        "ids": np.asarray([pending.id for pending in pendings], np.int64),
        "lengths": np.asarray([len(prompt) for prompt in prompts], np.int32),
    }
    if isinstance(prompts[0], bytes):
        columns["texts"] = np.frombuffer(b"".join(prompts), np.uint8)  # type: ignore[arg-type]
    else:
        columns["prompts"] = np.concatenate(prompts)
    columns["seeds"] = np.asarray([pending.seed for pending in pendings], np.int64)
    return columns
