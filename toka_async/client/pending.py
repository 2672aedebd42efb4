"""Requests on their way, and their waiters: for one result, for many results together, or for events as they come.

Knows no sockets, and of the protocol only the rows of results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from toka_async.arrays import Int32
from toka_async.client.errors import ConnectionLostError
from toka_async.client.results import FINISH, Event, PromptScores, Result, Row, Sample
from toka_async.protocol import ProtocolError

K = TypeVar("K")

STOP = 1  # messages.Reason: an end token
MAX_TOKENS = 16  # unless a request says otherwise


class RequestOptions:
    """The fields that some requests have in common. encoded: as the server gets them."""

    def __init__(self, fields: Mapping[str, Any], encoded: bytes, stream: bool) -> None:
        self.encoded = encoded
        self.stream = stream
        n, tokens = fields.get("n", 1), fields.get("max_tokens", MAX_TOKENS)
        self.n = n if isinstance(n, int) else 1
        self.max_tokens = tokens if isinstance(tokens, int) else MAX_TOKENS
        self.cache_salt = str(fields.get("cache_salt", ""))
        stops = fields.get("stop")
        self._stops = tuple(dict.fromkeys([stops] if isinstance(stops, str) else select_type(stops, str)))
        self._stop_token_ids = frozenset(select_type(fields.get("stop_token_ids"), int))

    def find_stop(self, row: Row) -> str | int | None:
        """Find which stop string or id of the request ended the sample. Raises ProtocolError for an unknown string."""
        if row.stop >= 0:
            if row.stop >= len(self._stops):
                raise ProtocolError(f"request {row.id} has no stop string {row.stop}", "stops")
            return self._stops[row.stop]
        if row.reason == STOP and self._stop_token_ids and row.token_ids.size:
            last = int(row.token_ids[-1])
            return last if last in self._stop_token_ids else None
        return None


def select_type(values: Any, kind: type[K]) -> list[K]:
    """Keep the values of one type; the server refuses the others."""
    return [value for value in values if isinstance(value, kind)] if isinstance(values, list | tuple) else []


News = Event | Result | Exception


class Waiter(Protocol):
    """Waits for a request: for events of a streamed one, for the result of another, or for the error."""

    def tell(self, pending: Pending, news: News) -> None: ...


class Pending:
    """A request. `waiter` is None when the result is no longer wanted.

    is_sent: over this connection. may_run: the server may have it, also from an earlier connection.
    """

    __slots__ = (
        "has_begun",
        "id",
        "is_sent",
        "may_run",
        "num_open",
        "options",
        "place",
        "prompt",
        "samples",
        "scores",
        "seed",
        "waiter",
    )

    def __init__(
        self, key: int, prompt: Int32 | bytes, seed: int, options: RequestOptions, waiter: Waiter, place: int = 0
    ) -> None:
        self.id = key
        self.prompt = prompt
        self.seed = seed
        self.options = options
        self.waiter: Waiter | None = waiter
        self.place = place  # among the requests of one waiter
        self.is_sent = self.may_run = False
        self.restart()

    def restart(self) -> None:
        self.has_begun = False
        self.num_open = self.options.n
        self.samples: list[Sample | None] = []
        self.scores: PromptScores | None = None

    def take(self, row: Row) -> bool:
        """Take a row of results; True if it is the last. Raises ProtocolError for an impossible row."""
        reason, options = FINISH[row.reason], self.options
        if not 0 <= row.sample < max(1, options.n):
            raise ProtocolError(f"request {self.id} has no sample {row.sample}", "samples")
        if reason is None and not options.stream:
            raise ProtocolError(f"request {self.id} is not streamed, but has a sample that goes on", "reasons")
        self.has_begun = True
        stop = options.find_stop(row)
        self.num_open -= reason is not None
        scores = (row.logprobs, row.top_ids, row.top_logprobs, row.kept, row.masses)
        parts = (row.token_ids, row.text, reason, stop, *scores, row.versions)
        if self.waiter is None:
            pass
        elif options.stream:
            self.waiter.tell(self, Event(*parts, sample=row.sample))
        elif options.n == 1:
            self.waiter.tell(self, Result([Sample(*parts)], row.cached, self.scores))
        else:
            self._keep(row.sample, Sample(*parts), row.cached)
        return not self.num_open

    def _keep(self, place: int, sample: Sample, cached: int) -> None:
        self.samples = self.samples or [None] * self.options.n
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


class EachResult:
    """Waits for `count` requests together; the first error ends them all. take: gets a request's place and result."""

    def __init__(self, count: int, take: Callable[[int, Result], None]) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take = take
        self._num_open = count

    def tell(self, pending: Pending, news: News) -> None:
        if self.future.done():
            return
        if isinstance(news, Exception):
            self.future.set_exception(news)
            return
        assert isinstance(news, Result)
        try:
            self._take(pending.place, news)
        except Exception as error:
            self.future.set_exception(error)
            return
        self._num_open -= 1
        if not self._num_open:
            self.future.set_result(None)


class RequestEvents:
    def __init__(self) -> None:
        self._queue: asyncio.Queue[News] = asyncio.Queue()

    async def next(self) -> Event:
        news = await self._queue.get()
        if isinstance(news, Exception):
            raise news
        assert isinstance(news, Event)
        return news

    def tell(self, pending: Pending, news: News) -> None:
        del pending
        self._queue.put_nowait(news)


def make_lost_error(pending: Pending) -> ConnectionLostError:
    return ConnectionLostError(f"the server has forgotten stream {pending.id}, of which a part has come")


def make_columns(pendings: Sequence[Pending]) -> dict[str, np.ndarray[Any, Any]]:
    """The columns of requests with the same options and the same kind of prompt."""
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
