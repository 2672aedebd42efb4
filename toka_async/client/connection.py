"""A connection to one server: kept alive, restored after a break, with the requests that are open over it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq

from toka_async.client.errors import CommandError, ConnectionLostError
from toka_async.client.exchange import Exchange
from toka_async.client.pending import Pending
from toka_async.protocol import CommandReply, ProtocolError, Welcome
from toka_async.transport.curve import KeyPair, read_pair, read_public
from toka_async.transport.zmq_frames import Dealer, Frame, Loss

SHORTEST = 0.05  # seconds between two pings or retries, whatever the server wants
BYE_TIMEOUT = 500  # milliseconds for the last messages to leave

ZmqContext = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """keys: this client's. server_key: the server's public key. max_message: bytes of a message of the server."""

    keys: KeyPair | None
    server_key: bytes | None
    max_message: int

    @classmethod
    def read(cls, key: Path | str | None, server_key: Path | str | None, max_message_mb: int) -> Self:
        """Read the key files. Raises KeyFileError, and ValueError when only one file is given."""
        if (key is None) != (server_key is None):
            raise ValueError("key and server_key: give both, or none")
        keys = None if key is None else read_pair(Path(key))
        return cls(keys, None if server_key is None else read_public(Path(server_key)), max_message_mb << 20)


class ClientConnection:
    """Connects when made, and reconnects until it is closed or a loss is final.

    Args:
        retries: see `Exchange`.
        on_welcome: called when the server has welcomed the client, again after each break.
        on_loss: called when the connection breaks or cannot be made. After a final loss it is closed, and the requests
            that are open wait for `fail`.

    Attributes:
        num_heard: messages of the server.

    Raises:
        ValueError: the address is none.
    """

    def __init__(
        self,
        context: ZmqContext,
        url: str,
        options: ConnectionOptions,
        *,
        on_welcome: Callable[[Welcome], None],
        on_loss: Callable[[Loss], None],
        retries: bool = True,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_welcome = on_welcome
        self._on_loss = on_loss
        self.num_heard = 0
        self._flushing = False
        self._timers: set[asyncio.TimerHandle] = set()
        self._pings: asyncio.TimerHandle | None = None
        self._dealer = Dealer(
            context, url, keys=options.keys, server_key=options.server_key, max_frame=options.max_message
        )
        self._exchange = Exchange(self._dealer.send, self._retry, retries=retries)
        try:
            self._dealer.connect(self._loop, self._on_frames, self._exchange.introduce, self._lose)
        except ValueError:
            self.close()
            raise

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self._exchange.num_open

    def add(self, pending: Pending) -> None:
        self._exchange.add(pending)
        self._wake()

    def abandon(self, pendings: Sequence[Pending]) -> None:
        """Stop waiting for requests, and cancel them if the server may have them."""
        for pending in pendings:
            self._exchange.abandon(pending)
        self._wake()

    async def command(self, name: str, args: bytes) -> bytes:
        """Send a command, and wait for what it returns. Raises CommandError or ConnectionLostError."""
        future: asyncio.Future[bytes] = self._loop.create_future()

        def take(reply: CommandReply | Exception) -> None:
            if future.done():
                return
            if isinstance(reply, Exception):
                future.set_exception(reply)
            elif reply.error is not None:
                future.set_exception(CommandError(reply.error))
            else:
                future.set_result(bytes(reply.result))

        number = self._exchange.command(name, args, take)
        try:
            return await future
        finally:
            self._exchange.forget_command(number)

    def fail(self, error: Exception) -> None:
        """End all open requests."""
        self._exchange.fail_all(error)

    def close(self, *, says_bye: bool = False) -> None:
        """Disconnect. says_bye: so that the server cancels what runs now, not when it has heard nothing for long."""
        if says_bye:
            self._exchange.say_bye()
        self._exchange.note_disconnected()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._dealer.close(linger=BYE_TIMEOUT if says_bye else 0)

    def _lose(self, loss: Loss) -> None:
        self._exchange.note_disconnected()
        if loss.is_final:
            self.close()
        self._on_loss(loss)

    def ping(self) -> None:
        """Ask the server for a sign of life, if it has welcomed the client."""
        self._exchange.ping()

    def _on_frames(self, frames: list[Frame]) -> None:
        self.num_heard += 1
        had_welcome = self._exchange.welcome is not None
        try:
            self._exchange.on_frames(frames)
        except ProtocolError as error:
            self._lose(Loss(f"the server does not speak the protocol: {error}", is_final=True))
        except ConnectionLostError as error:
            self._lose(Loss(str(error), is_final=True))
        if self._exchange.welcome is not None and not had_welcome:
            self._keep_alive()
            self._on_welcome(self._exchange.welcome)
        self._wake()

    def _keep_alive(self) -> None:
        if self._pings is not None:
            self._pings.cancel()
            self._timers.discard(self._pings)
            self._pings = None
        if self._exchange.welcome is not None:
            self._exchange.ping()
            self._pings = self._call_later(max(SHORTEST, self._exchange.welcome.heartbeat / 2), self._keep_alive)

    def _retry(self, seconds: float) -> None:
        self._call_later(max(SHORTEST, seconds), self._try_again)

    def _try_again(self) -> None:
        if self._exchange.welcome is None:
            self._exchange.introduce()
        self._exchange.retry()
        self._wake()

    def _call_later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        def run() -> None:
            self._timers.discard(timer)
            call()

        timer = self._loop.call_later(seconds, run)
        self._timers.add(timer)
        return timer

    def _wake(self) -> None:
        """Flush soon: everything that one turn of the loop brings goes out together."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if not self._dealer.socket.closed:
            self._exchange.flush()
