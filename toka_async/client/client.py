"""The asyncio client of one server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from toka_async.client.base_client import CLOSED, TIMEOUT, BaseClient
from toka_async.client.connection import ClientConnection, ConnectionOptions, ZmqContext
from toka_async.client.errors import ConnectionLostError
from toka_async.client.pending import Pending
from toka_async.protocol import Welcome
from toka_async.transport.zmq_frames import Loss


class Client(BaseClient):
    """Requests to one server. Use it as an async context manager; any number of tasks may share it.

    Args:
        url: the server's, such as tcp://127.0.0.1:10211.
        key: this client's NAME.key_secret, and server_key: the server's NAME.key, for an encrypted connection.
        timeout: seconds to wait for the first connection, also while no server listens yet. None: 10, but 0
            while no server listens.
        max_message_mb: MiB of a message of the server; one that sends longer ones is disconnected.

    Attributes:
        welcome: what the server said of itself on the latest connection; None before the first one.

    Raises:
        ConnectionLostError: no connection could be made (on entering the context).
        KeyFileError: a key file is missing or wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        key: Path | str | None = None,
        server_key: Path | str | None = None,
        timeout: float | None = None,
        max_message_mb: int = 1024,
    ) -> None:
        super().__init__()
        self._url = url
        self._connection_options = ConnectionOptions.read(key, server_key, max_message_mb)
        self._timeout = timeout
        self.welcome: Welcome | None = None
        self._connection: ClientConnection | None = None
        self._problem: str | None = None  # of the connection that is being made
        self._lost: str | None = CLOSED  # why there is no connection, and none will be

    async def __aenter__(self) -> Self:
        self._context: ZmqContext = zmq.Context()
        self._settled = asyncio.Event()  # it is known whether there is a connection
        self._connection = self._problem = self._lost = None
        try:
            await self._connect()
        except BaseException:
            await self._close(says_bye=False)
            raise
        return self

    async def _connect(self) -> None:
        try:
            self._connection = self._make_connection(ClientConnection)
            async with asyncio.timeout(TIMEOUT if self._timeout is None else self._timeout):
                await self._settled.wait()
        except TimeoutError:
            self._problem = self._problem or "nobody answers"
        except ValueError as error:
            self._problem = str(error)
        if self._problem is not None:
            raise ConnectionLostError(f"no connection to {self._url}: {self._problem}")

    def _make_connection(self, kind: type[ClientConnection]) -> ClientConnection:
        options = self._connection_options
        return kind(self._context, self._url, options, on_welcome=self._on_welcome, on_loss=self._on_loss)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._close(says_bye=True)

    async def _close(self, *, says_bye: bool) -> None:
        self._lost = CLOSED
        if self._connection is not None:
            self._connection.fail(ConnectionLostError("the client was closed"))
            self._connection.close(says_bye=says_bye)
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)

    def _on_welcome(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self._problem = None
        self._settled.set()

    def _on_loss(self, loss: Loss) -> None:
        if loss.problem is None:
            return
        self._problem = loss.problem
        if loss.is_final:
            self._lost = f"no connection to {self._url}: {loss.problem}"
            if self._connection is not None:
                self._connection.fail(ConnectionLostError(self._lost))
        if loss.is_final or self._timeout is None:
            self._settled.set()

    async def command(self, name: str, args: Mapping[str, Any]) -> Any:
        """Control the engine: a command of PROTOCOL.md with its arguments; `Trainer` has a method for each.

        Raises:
            CommandError: the engine refuses it, or could not carry it out.
            ConnectionLostError: there is no connection, or it broke before the answer.
        """
        if self._lost is not None or self._connection is None:
            raise ConnectionLostError(self._lost)
        return msgspec.msgpack.decode(await self._connection.command(name, msgspec.msgpack.encode(args)))

    def _submit(self, pending: Pending) -> None:
        if self._lost is not None or self._connection is None:
            raise ConnectionLostError(self._lost)
        self._connection.add(pending)

    def _abandon(self, pendings: Sequence[Pending]) -> None:
        if self._connection is not None:
            self._connection.abandon(pendings)
