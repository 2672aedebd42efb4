"""Limits the memory of answers that clients have not taken yet, and decides who is cut off above the limit.

A whole answer stays in memory until its client has taken it. A client that takes nothing is cut off after
`limits.client_timeout`, but until then any number of clients could leave any amount unread. Streams are not counted:
they turn tokens into text only as their clients take it. Knows aiohttp, not what is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from toka_async.config import LimitsConfig
from toka_async.server.access.errors import Handler
from toka_async.server.engine.metrics import Metrics
from toka_async.server.limits.free_memory import LARGE, release_free_memory

LEAST = 1 << 14  # bytes; smaller answers do not count
SLICE = 1 << 20  # bytes of one write of an answer
CHUNK = 1 << 16  # bytes of one read of a file
DOWNLOAD = 3 * CHUNK  # measured bytes of an untaken download: a chunk, a copy of it, and its connection
IDLE = 10.0  # seconds without taking anything; even a client on a slow line takes something more often
INTERVAL = 1.0  # seconds between looks at who takes something, while room is short


@dataclass(slots=True, eq=False)
class Sending:
    """An answer on its way. taken: a value that changes while its client takes something. since: its last change."""

    request: web.BaseRequest
    num_bytes: int
    since: float
    taken: tuple[int, int] = (0, 0)

    def look(self, now: float) -> None:
        transport = self.request.transport
        left = 0 if transport is None else transport.get_write_buffer_size()
        if (taken := (self.request.writer.output_size, left)) != self.taken:
            self.taken, self.since = taken, now


class Unsent:
    """All unsent answers of a server.

    most: bytes; above this, answers whose clients have taken nothing for longest are cut off. release: called in a
    thread when the last of very many bytes has left.
    """

    def __init__(self, most: int, release: Callable[[], None] = release_free_memory) -> None:
        self.most = most
        self.num_bytes = 0
        self._peak = 0  # most bytes since all answers were taken
        self._release = release
        self.num_cut = 0
        self._sendings: dict[Sending, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def count_sending(self, request: web.BaseRequest, num_bytes: int) -> Iterator[None]:
        """Counts an answer while it is sent."""
        loop = asyncio.get_running_loop()
        sending = Sending(request, num_bytes, loop.time())
        self._sendings[sending] = None
        self.num_bytes += num_bytes
        self._peak = max(self._peak, self.num_bytes)
        if self.num_bytes > self.most:
            self._make_room(sending)
        self._watch()
        try:
            yield
        finally:
            self._leave(sending)

    def _leave(self, sending: Sending) -> None:
        if sending in self._sendings:
            del self._sendings[sending]
            self.num_bytes -= sending.num_bytes
        if not self._sendings:
            peak, self._peak = self._peak, 0
            if peak >= LARGE:
                loop = asyncio.get_running_loop()
                loop.call_later(INTERVAL, loop.run_in_executor, None, self._release)  # the buffers are freed by then

    def _make_room(self, newest: Sending) -> None:
        """Cuts off those who have taken nothing for longest.

        It cuts off more of those that do not read at all than necessary, so that not every further answer looks at all
        others.
        """
        now = asyncio.get_running_loop().time()
        for sending in self._sendings:
            sending.look(now)
        for sending in sorted(self._sendings, key=lambda each: each.since):
            goal = self.most * 3 // 4 if now - sending.since >= IDLE else self.most
            if self.num_bytes <= goal:
                return
            if sending is not newest:
                self.num_cut += 1
                self._leave(sending)
                if sending.request.transport is not None:
                    sending.request.transport.abort()

    def _watch(self) -> None:
        if self._timer is None and self.num_bytes > self.most // 2:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._look)

    def _look(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        for sending in self._sendings:
            sending.look(now)
        self._watch()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Asserts consistency; for tests."""
        assert self.num_bytes == sum(sending.num_bytes for sending in self._sendings)

    def show(self, metrics: Metrics) -> None:
        """Adds the numbers to the metrics."""
        metrics.watch_gauge("http_unsent_bytes", "of answers that are being sent", lambda: self.num_bytes)
        metrics.watch_count("http_answers_cut", "that were not taken while memory was short", lambda: self.num_cut)


UNSENT: web.AppKey[Unsent] = web.AppKey("unsent", Unsent)


def create_unsent(config: LimitsConfig) -> Unsent:
    return Unsent((8 * config.max_body_mb if config.max_unsent_mb == "auto" else config.max_unsent_mb) << 20)


class Sliced(Payload):
    """A whole answer that is written a slice at a time, each when the client has taken the one before.

    The event loop's TLS transport accepts all it is given, encrypts it at once and does not say how much is left.
    """

    def __init__(self, body: bytes | bytearray, request: web.BaseRequest, unsent: Unsent) -> None:
        super().__init__(body)
        self._body = body
        self._request = request
        self._unsent = unsent

    @property
    def size(self) -> int:
        return len(self._body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._body.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        view = memoryview(self._body)
        with self._unsent.count_sending(self._request, len(view)):
            for start in range(0, len(view), SLICE):
                await writer.write(view[start : start + SLICE])
                await writer.drain()


class FileDownload(web.FileResponse):
    def __init__(self, path: Path, headers: dict[str, str]) -> None:
        super().__init__(path, chunk_size=CHUNK, headers=headers)

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        assert isinstance(request, web.Request)
        with request.app[UNSENT].count_sending(request, DOWNLOAD):
            return await super().prepare(request)


@web.middleware
async def count_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts answers that are in memory as a whole."""
    response = await handler(request)
    if isinstance(response, web.Response):
        body = response.body
        if isinstance(body, bytes | bytearray) and len(body) > LEAST:
            response.body = Sliced(body, request, request.app[UNSENT])
    return response
