"""Requests on their way through the engine: what has come back of them, sample by sample, and a way to wait for more.

Tokens stay arrays; a row of a Tokens message costs a few slices. Knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

import numpy as np

from toka_async.messages import Prefilled, Reason
from toka_async.server.engine.rows import TokenBlock, TokenRows, join, merged

MOST_TOKENS = 1024  # of samples with news, in one go: what they become is made in one turn of the event loop
BLOCK_TOKENS = 64 * MOST_TOKENS  # of flights in blocks, whose tokens are so much cheaper


class RequestFailedError(Exception):
    """The engine refused the request; the message says why."""


class TimedOutError(RequestFailedError):
    """The request took longer than it may."""


def timed_out(timeout: float) -> TimedOutError:
    return TimedOutError(f"it took longer than limits.request_timeout ({timeout:g} s)")


class EngineStoppedError(Exception):
    """The engine is gone, and with it the requests that it held."""


@dataclass(slots=True)
class RunningSample:
    """One sample.

    parts: tokens not yet taken. num_tokens: all that have come, taken ones included. reason: why it ended.
    ending: a stop string was found and the scheduler told. muted: its text is complete, later tokens are dropped.
    """

    parts: list[TokenRows] = field(default_factory=list)
    reason: Reason = Reason.NONE
    num_tokens: int = 0
    ending: bool = False
    muted: bool = False

    def take(self) -> TokenRows:
        """All tokens not yet taken."""
        rows = join(self.parts)
        self.parts.clear()
        return rows


class RequestGroup:
    """Engine requests that one caller waits for together."""

    def __init__(self) -> None:
        self.flights: list[InFlight] = []
        self.error: Exception | None = None
        self._num_open = 0
        self._fresh: dict[tuple[int, int], None] = {}  # (flight's index, sample) with news, in order of arrival
        self._news = asyncio.Event()

    def add(self, flight: InFlight) -> None:
        self.flights.append(flight)
        self._num_open += 1

    def note(self, index: int, sample: int) -> None:
        """A streamed flight has news of a sample."""
        self._fresh[index, sample] = None
        self._news.set()

    def note_end(self, error: Exception | None) -> None:
        """A flight is over."""
        self._num_open -= 1
        self.error = self.error or error
        if error is not None or not self._num_open:
            self._news.set()

    async def news(self) -> list[tuple[InFlight, int]]:
        """Waits for news of streamed requests: samples that have some, each once, however much has come.

        Where a slow client has let much come together it is some of them, MOST_TOKENS or a few more, and others have
        their turn of the event loop before the rest.

        Raises:
            RequestFailedError, EngineStoppedError: one of them will get no more.
        """
        if self._fresh:
            await asyncio.sleep(0)
        while not self._fresh:
            await self._wait()
        fresh, num_tokens = [], 0
        for index, sample in self._fresh:
            fresh.append((index, sample))
            num_tokens += self.flights[index].num_waiting(sample)
            if num_tokens >= MOST_TOKENS:
                break
        for place in fresh:
            del self._fresh[place]
        return [(self.flights[index], sample) for index, sample in fresh]

    async def finished(self) -> None:
        """Waits until every sample has ended.

        Raises:
            RequestFailedError, EngineStoppedError: one of them ended otherwise.
        """
        while self._num_open or self.error is not None:
            await self._wait()

    def check(self) -> None:
        """Raises RequestFailedError or EngineStoppedError: one of them will get no more."""
        if self.error is not None:
            raise self.error

    async def _wait(self) -> None:
        self.check()
        self._news.clear()
        await self._news.wait()


class InFlight:
    """One engine request.

    Args:
        batch: whose it is; it is told of news.
        request_id: the engine's number.
        num_prompt: prompt tokens.
        n: samples.
        stream: tokens are wanted as they come.
        now: seconds, when it was submitted.
        in_blocks: the likeliest tokens are not wanted, and if it streams, nothing but text that no stop string ends:
            what comes is kept in blocks of many samples, and not in `samples`.
    """

    __slots__ = (
        "_blocks",
        "_closed",
        "batch",
        "in_blocks",
        "index",
        "num_open",
        "num_prompt",
        "num_tokens",
        "prefilled",
        "request_id",
        "samples",
        "stream",
        "submitted",
        "touched",
    )

    def __init__(
        self,
        batch: RequestGroup,
        request_id: int,
        num_prompt: int,
        n: int,
        stream: bool,
        now: float,
        in_blocks: bool = False,
    ) -> None:
        self.request_id = request_id
        self.num_prompt = num_prompt
        self.stream = stream
        self.submitted = now
        self.in_blocks = in_blocks
        self.index = len(batch.flights)
        self.batch = batch
        self._clear(n)
        batch.add(self)

    def _clear(self, n: int) -> None:
        self.samples = [] if self.in_blocks else [RunningSample() for _ in range(n)]
        self._blocks: list[TokenBlock] = []
        self._closed = np.zeros(n if self.in_blocks else 0, np.bool_)  # samples that have ended or are ending
        self.num_open = n
        self.num_tokens = 0  # of all samples, as they came
        self.prefilled: Prefilled | None = None
        self.touched = False  # something has come of a sample

    def restart(self, request_id: int, n: int) -> None:
        """It is computed again from its beginning, under a new number: what has come is forgotten.

        Nobody may have taken anything: nothing has come, or it is not streamed.
        """
        assert not (self.stream and self.touched), "a client has seen the beginning"
        self.request_id = request_id
        self._clear(n)

    @property
    def num_cached(self) -> int:
        """Prompt tokens found in the prefix tree."""
        return self.prefilled.cached_tokens if self.prefilled else 0

    def add(self, index: int, rows: TokenRows, reason: Reason) -> None:
        """What the engine says of a sample."""
        self.touched = True
        sample = self.samples[index]
        assert sample.reason is Reason.NONE, f"sample {index} of request {self.request_id} goes on after its end"
        sample.num_tokens += len(rows)
        self.num_tokens += len(rows)
        if len(rows) and not sample.muted:
            sample.parts.append(rows)
        if reason is not Reason.NONE:
            sample.reason = reason
            self.num_open -= 1
        if self.stream and not sample.muted:
            self.batch.note(self.index, index)

    def add_block(self, block: TokenBlock) -> None:
        """What the engine says of some samples of a flight `in_blocks`."""
        self.touched = True
        self._blocks.append(block)
        self.num_tokens += block.token_ids.size
        ended = block.samples[block.reasons != 0]
        self._closed[ended] = True
        self.num_open -= ended.size
        if self.stream:
            self.batch.note(self.index, 0)

    def is_closed(self, index: int) -> bool:
        """Whether the sample has ended, or the scheduler was told of its end."""
        if self.in_blocks:
            return bool(self._closed[index])
        sample = self.samples[index]
        return sample.ending or sample.reason is not Reason.NONE

    def close(self, index: int) -> None:
        """The scheduler is told of the sample's end; of a streamed one later tokens are dropped."""
        if self.in_blocks:
            self._closed[index] = True
        else:
            self.samples[index].ending = True
            self.samples[index].muted = self.stream

    def num_waiting(self, index: int) -> int:
        """Tokens of a sample that were not taken yet; of a flight `in_blocks` of all, and what they cost of others'."""
        if self.in_blocks:
            return sum(block.token_ids.size for block in self._blocks) * MOST_TOKENS // BLOCK_TOKENS
        return sum(map(len, self.samples[index].parts))

    def take_block(self) -> TokenBlock:
        """All that has come and was not taken yet, something at least."""
        block = merged(self._blocks)
        self._blocks.clear()
        return block

    def take_news(self) -> TokenBlock:
        """As `take_block` of a streamed flight, but BLOCK_TOKENS or a few more: of the rest there will be news."""
        sizes = accumulate(block.token_ids.size for block in self._blocks)
        num = 1 + sum(1 for _ in takewhile(lambda size: size < BLOCK_TOKENS, sizes))
        block = merged(self._blocks[:num])
        del self._blocks[:num]
        if self._blocks:
            self.batch.note(self.index, 0)
        return block

    def end(self, error: Exception | None) -> None:
        """Nothing more comes: all samples have ended, or `error` ends the whole batch."""
        self.batch.note_end(error)
