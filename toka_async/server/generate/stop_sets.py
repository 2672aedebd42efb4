"""Sets of stop strings, registered with the schedulers once each, and its questions whether one was found.

Idle sets stay registered, so that the mask of a set in steady use is computed once; the longest idle ones go when
there are too many. Streamed requests need none: their stop strings are found in the text that is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import Bool, as_i32, column
from toka_async.messages import DropStop, StopChecks, StopMask
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.request_table import Sink
from toka_async.server.generate.sample_text import TextOptions
from toka_async.text.stop import StopStrings, StopWatch
from toka_async.text.tokenizer import Tokenizer
from toka_async.text.vocabulary import Vocabulary

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Watched:
    """Requests of one sink whose samples are looked at, by key and sample. ended: those that a string was found in."""

    options: TextOptions
    tokenizer: Tokenizer
    samples: dict[tuple[int, int], StopWatch] = field(default_factory=dict)
    ended: set[tuple[int, int]] = field(default_factory=set)


@dataclass(slots=True)
class StopSet:
    """A registered set. `sent` is done when the scheduler has been told of it."""

    stop_id: int
    sent: asyncio.Task[None]
    num_users: int = 0


class StopSets:
    """The sets of one engine.

    Args:
        max_idle: sets that nobody uses which stay registered.
        executor: where masks are computed.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, executor: Executor, max_idle: int = 64) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._executor = executor
        self._max_idle = max_idle
        self._sets: dict[Key, StopSet] = {}  # those idle for longest first among the idle ones
        self._next_id = 0
        self._vocabulary: Vocabulary | None = None
        self._watched: dict[Sink, Watched] = {}
        engine.on_stop_checks.append(self._on_checks)

    @asynccontextmanager
    async def use(self, stops: StopStrings, vocab_size: int) -> AsyncIterator[int]:
        """The id of the set, known to the scheduler until this is left. `vocab_size` is the model's."""
        key = tuple(sorted(stops.strings))
        found = self._sets.pop(key, None) or self._register(stops, vocab_size)
        self._sets[key] = found
        found.num_users += 1
        try:
            await asyncio.shield(found.sent)
            yield found.stop_id
        finally:
            found.num_users -= 1
            if not found.num_users:
                self._leave(key)

    @contextmanager
    def watched(self, sink: Sink, options: TextOptions, tokenizer: Tokenizer) -> Iterator[None]:
        """While in it, the scheduler's questions about the sink's requests are answered. tokenizer: of their texts."""
        self._watched[sink] = Watched(options, tokenizer)
        try:
            yield
        finally:
            del self._watched[sink]

    def _register(self, stops: StopStrings, vocab_size: int) -> StopSet:
        stop_id, self._next_id = self._next_id, self._next_id + 1
        return StopSet(stop_id, asyncio.create_task(self._send(stop_id, stops, vocab_size)))

    async def _send(self, stop_id: int, stops: StopStrings, vocab_size: int) -> None:
        loop = asyncio.get_running_loop()
        mask = await loop.run_in_executor(self._executor, self._mask, stops, vocab_size)
        self._engine.replicas.tell_all(StopMask(stop_id=stop_id, mask=column(mask), window=stops.window))

    def _mask(self, stops: StopStrings, vocab_size: int) -> Bool:
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._tokenizer)
        return np.ascontiguousarray(stops.completion_mask(self._vocabulary, vocab_size))

    def _leave(self, key: Key) -> None:
        """The last user is gone: the set is idle from now on, or forgotten when it could not be made."""
        idle = self._sets.pop(key)
        if idle.sent.done() and (idle.sent.cancelled() or idle.sent.exception() is not None):
            return
        self._sets[key] = idle
        self._evict()

    def _evict(self) -> None:
        idle = [key for key, entry in self._sets.items() if not entry.num_users and entry.sent.done()]
        for key in idle[: max(0, len(idle) - self._max_idle)]:
            self._engine.replicas.tell_all(DropStop(stop_id=self._sets.pop(key).stop_id))

    def _on_checks(self, message: StopChecks) -> None:
        token_ids = as_i32(message.token_ids).tolist()
        end = 0
        columns = (message.request_ids, message.samples, message.num_tokens, message.counts)
        rows = zip(*(as_i32(each).tolist() for each in columns), strict=True)
        for request_id, sample, num_tokens, count in rows:
            end += count
            self._check(request_id, sample, num_tokens, token_ids[end - count : end])

    def _check(self, request_id: int, sample: int, num_tokens: int, window: list[int]) -> None:
        sink, key = self._engine.requests.find(request_id) or (None, 0)
        watched = None if sink is None else self._watched.get(sink)
        if watched is None or (key, sample) in watched.ended:
            return
        watch = watched.samples.get((key, sample))
        if watch is None:
            options = watched.options
            assert options.stops is not None
            watch = watched.samples[key, sample] = StopWatch(
                options.stops,
                watched.tokenizer,
                skip_special_tokens=options.skip_special_tokens,
                min_tokens=options.min_tokens,
            )
        found = watch.check(window, num_tokens)
        if found is not None:
            watched.ended.add((key, sample))
            self._engine.requests.end_sample(request_id, sample, found)
