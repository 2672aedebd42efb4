"""Accepts HTTP connections, with or without TLS: all that wait, some in each turn of the event loop.

The event loop's own server accepts one connection a turn, so under load a burst of connections waits for as many turns.
Knows sockets; knows no HTTP beyond a refusal.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import suppress
from functools import partial

from aiohttp import web

from toka_async.openai.errors import ApiError
from toka_async.server.engine.metrics import Metrics
from toka_async.server.http.connections import HttpConnection, refusal

logger = logging.getLogger(__name__)

BURST = 64  # connections that are accepted in one turn of the event loop: some milliseconds
PAUSE = 1.0  # seconds after which to try again when the system lets no more connections in


class Acceptor(web.BaseSite):
    """A site at a listening socket.

    Args:
        most: connections at once, those in their TLS handshake too; further ones are refused.
        client_timeout: see `HttpConnection`.
        context: of TLS; None for plain connections.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        most: int,
        client_timeout: float,
        context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner)
        assert runner.server is not None
        self.num_refused = 0
        self._web_server = runner.server
        self._listener = listener
        self._most = most
        self._client_timeout = client_timeout
        self._context = context
        self._connections: set[socket.socket] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{'http' if self._context is None else 'https'}://{host}:{port}"

    @property
    def num_open(self) -> int:
        """Connections, those in their handshake too."""
        return len(self._connections)

    def show(self, metrics: Metrics) -> None:
        """From now on they are metrics."""
        metrics.watch_gauge("http_connections", "open HTTP connections", lambda: self.num_open)
        metrics.watch_count("http_connections_refused", "more than may be open at once", lambda: self.num_refused)

    async def start(self) -> None:
        await super().start()
        self._listener.setblocking(False)
        self._listen()

    async def stop(self) -> None:
        """Accepts no more. A connection that is in its TLS handshake is closed."""
        if self._retry is not None:
            self._retry.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._context is not None:
            for task in self._opening:
                task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        self._listener.close()
        await super().stop()

    def _listen(self) -> None:
        """Connections are accepted after those are gone that have ended in the same turn: they have their places."""
        self._retry = None
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, loop.call_soon, self._accept)

    def _accept(self) -> None:
        if self._listener.fileno() < 0:  # closed in the meantime
            return
        for _ in range(BURST):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # the client was gone before its connection was accepted
                continue
            except OSError as error:  # no descriptors or no memory: the event loop must not spin until there are some
                logger.error("no connection can be accepted: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                self._retry = loop.call_later(PAUSE, self._listen)
                return
            connection.setblocking(False)
            if self.num_open >= self._most:
                self._refuse(connection)
                continue
            self._connections.add(connection)
            task = asyncio.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(partial(self._opened, connection))

    def _refuse(self, connection: socket.socket) -> None:
        """Says why, but not over TLS: a handshake is what there is no room for."""
        self.num_refused += 1
        with connection, suppress(OSError):
            if self._context is None:
                connection.send(refusal(ApiError(503, "too many connections", code="overloaded", retry_after=1)))
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)  # closing a socket with unread data would take the refusal back

    async def _open(self, connection: socket.socket) -> None:
        on_lost = partial(self._connections.discard, connection)
        await asyncio.get_running_loop().connect_accepted_socket(
            partial(HttpConnection, self._web_server, self._client_timeout, on_lost), connection, ssl=self._context
        )

    def _opened(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        """The connection is open, or it never will be."""
        self._opening.discard(task)
        if not task.cancelled() and task.exception() is None:
            return
        self._connections.discard(connection)
        connection.close()
        if not task.cancelled() and not isinstance(task.exception(), OSError):  # ssl.SSLError is one
            logger.error("a connection could not be opened", exc_info=task.exception())
