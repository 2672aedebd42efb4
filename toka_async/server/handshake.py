"""Accepts TLS connections: how many may be in their handshake at once, in all and from one address. Knows no HTTP.

The framework's own sites leave handshakes to the event loop, which tells nobody of a connection until it is through.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from functools import partial

from aiohttp import web

logger = logging.getLogger(__name__)

LONGEST = 60.0  # seconds of a handshake
SPARE = 128  # handshakes besides all connections that may be open, so that one too many gets to see why
PAUSE = 1.0  # seconds after which to try again when the system lets no more connections in


class Handshakes:
    """Those of one server.

    most: of handshakes and open connections together. most_of_address: 0 for no limit. num_refused: connections that
    were too many, and have got no answer.
    """

    def __init__(self, most: int, most_of_address: int, num_connections: Callable[[], int]) -> None:
        self.most = most
        self.most_of_address = most_of_address
        self.num_open = 0
        self.num_refused = 0
        self._num_connections = num_connections
        self._of_address: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """False when there are too many."""
        is_full = self.num_open + self._num_connections() >= self.most + SPARE
        if is_full or 0 < self.most_of_address <= self._of_address[address]:
            self.num_refused += 1
            return False
        self.num_open += 1
        self._of_address[address] += 1
        return True

    def leave(self, address: str) -> None:
        self.num_open -= 1
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]


class TlsSite(web.BaseSite):
    """A site at a listening socket; connections come to the runner's server when they have shaken hands."""

    def __init__(
        self, runner: web.AppRunner, listener: socket.socket, context: ssl.SSLContext, handshakes: Handshakes
    ) -> None:
        super().__init__(runner)
        self._listener = listener
        self._context = context
        self._handshakes = handshakes
        self._accepting: asyncio.Task[None] | None = None
        self._shaking: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"https://{host}:{port}"

    async def start(self) -> None:
        await super().start()
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        """Accepts no more; who is in a handshake is cut off."""
        tasks = [*self._shaking, *([] if self._accepting is None else [self._accepting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        await super().stop()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(self._listener)
            except ConnectionError:  # it was gone before it was taken
                continue
            except OSError as error:
                logger.error("no connection can be accepted: %s", error)
                await asyncio.sleep(PAUSE)
                continue
            if not self._handshakes.enter(address):
                connection.close()
                continue
            task = asyncio.create_task(self._shake_hands(connection))
            self._shaking.add(task)
            task.add_done_callback(partial(self._shaken, connection, address))

    async def _shake_hands(self, connection: socket.socket) -> None:
        server = self._runner.server
        assert server is not None
        await asyncio.get_running_loop().connect_accepted_socket(
            server, connection, ssl=self._context, ssl_handshake_timeout=LONGEST
        )

    def _shaken(self, connection: socket.socket, address: str, task: asyncio.Task[None]) -> None:
        """It is over, also when it was cancelled before it had begun."""
        self._shaking.discard(task)
        self._handshakes.leave(address)
        if task.cancelled():
            connection.close()
        elif (error := task.exception()) is not None:
            connection.close()
            if not isinstance(error, OSError):  # ssl.SSLError is one
                logger.error("a TLS handshake failed", exc_info=error)
