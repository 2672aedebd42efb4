"""The asyncio client: a connection that is kept alive and restored, and the requests over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from operator import index
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self, Unpack

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from toka_async.arrays import Int32
from toka_async.client.errors import ConnectionLostError, RequestError
from toka_async.client.exchange import Exchange
from toka_async.client.fields import Fields
from toka_async.client.pending import EachResult, OneResult, Pending, RequestEvents, RequestOptions, Waiter
from toka_async.client.results import Event, Result
from toka_async.protocol import ProtocolError, Welcome
from toka_async.transport.curve import read_pair, read_public
from toka_async.transport.zmq_frames import Dealer, Frame, Loss

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]
MOST_OPTIONS = 256  # kept in the cache
MOST_DEPTH = 16  # nested lists and maps in a field
NOT_IDS = np.empty((0, 0))
TIMEOUT = 10.0  # seconds for the first connection
SHORTEST = 0.05  # seconds between two pings or retries, whatever the server wants
BYE_TIMEOUT = 500  # milliseconds for the last messages to leave

_ENCODER = msgspec.msgpack.Encoder()


class Client:
    """Requests to one server. Use it as an async context manager; any number of tasks may share it.

    Args:
        url: the server's, such as tcp://127.0.0.1:10211.
        key: this client's NAME.key_secret, and server_key: the server's NAME.key, for an encrypted connection.
        timeout: seconds to wait for the first connection, also while no server listens yet. None: 10, but 0
            while no server listens.
        max_message_mb: MiB of a message of the server; one that sends longer ones is disconnected.

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
        if (key is None) != (server_key is None):
            raise ValueError("key and server_key: give both, or none")
        self._url = url
        self._keys = None if key is None else read_pair(Path(key))
        self._server_key = None if server_key is None else read_public(Path(server_key))
        self._timeout = timeout
        self._max_message = max_message_mb << 20
        self._next_id = 0
        self._random = Random()
        self._options: dict[bytes, RequestOptions] = {}
        self._flushing = False
        self._timers: set[asyncio.TimerHandle] = set()
        self._pings: asyncio.TimerHandle | None = None
        self._is_open = False

    # ---- the connection ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = Dealer(
            self._context, self._url, keys=self._keys, server_key=self._server_key, max_frame=self._max_message
        )
        self._exchange = Exchange(self._dealer.send, self._retry)
        self._settled = asyncio.Event()  # it is known whether there is a connection
        self._problem: str | None = None
        self._is_open = True
        try:
            await self._connect()
        except BaseException:
            await self._close()
            raise
        return self

    async def _connect(self) -> None:
        try:
            self._dealer.connect(self._loop, self._on_frames, self._exchange.introduce, self._on_lost)
            async with asyncio.timeout(TIMEOUT if self._timeout is None else self._timeout):
                await self._settled.wait()
        except TimeoutError:
            self._problem = self._problem or "nobody answers"
        except zmq.ZMQError as error:
            self._problem = error.strerror
        reason = self._exchange.refused or (self._problem if self._exchange.welcome is None else None)
        if reason is not None:
            raise ConnectionLostError(f"no connection to {self._url}: {reason}")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._exchange.fail_all(ConnectionLostError("the client was closed"))
        self._exchange.say_bye()
        await self._close()

    async def _close(self) -> None:
        self._is_open = False
        for timer in self._timers:
            timer.cancel()
        self._dealer.close(linger=BYE_TIMEOUT)
        await self._loop.run_in_executor(None, self._context.term)

    def _on_lost(self, loss: Loss) -> None:
        self._exchange.note_disconnected()
        if loss.problem is None:
            return
        self._problem = loss.problem
        if loss.is_final:
            self._exchange.refused = loss.problem
            self._exchange.fail_all(ConnectionLostError(f"no connection to {self._url}: {loss.problem}"))
        if loss.is_final or self._timeout is None:
            self._settled.set()

    def _on_frames(self, frames: list[Frame]) -> None:
        had_welcome = self._exchange.welcome is not None
        try:
            self._exchange.on_frames(frames)
        except ProtocolError as error:
            self._exchange.fail_all(ConnectionLostError(f"{self._url} does not speak the protocol: {error}"))
        welcome = self._exchange.welcome
        if welcome is not None and not had_welcome:
            self._ping()
        if welcome is not None or self._exchange.refused is not None:
            self._settled.set()
        self._wake()

    def _ping(self) -> None:
        if self._pings is not None:
            self._pings.cancel()
            self._timers.discard(self._pings)
            self._pings = None
        if self._exchange.welcome is not None:
            self._exchange.ping()
            self._pings = self._call_later(max(SHORTEST, self._exchange.welcome.heartbeat / 2), self._ping)

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

    @property
    def welcome(self) -> Welcome | None:
        """What the server says of itself and its limits, while there is a connection."""
        return self._exchange.welcome

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, prompt: Prompt, *, seed: int | None = None, **fields: Unpack[Fields]) -> Result:
        """Generate all samples of a prompt: text, or token ids. An int32 array is not copied and must not change
        meanwhile.

        Raises:
            RequestError: the server refuses the request; names the field.
            ConnectionLostError: the client was closed.
        """
        waiter = OneResult()
        pending = self._add(prompt, seed, self._make_options(fields, stream=False), waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._abandon([pending])
            raise

    async def generate_many(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int] | None = None, **fields: Unpack[Fields]
    ) -> list[Result]:
        """Run `generate` for each prompt (or row of an array), in order; the first error cancels the rest."""
        results: dict[int, Result] = {}
        await self.generate_each(prompts, results.__setitem__, seeds=seeds, **fields)
        return [results[place] for place in range(len(prompts))]

    async def generate_each(
        self,
        prompts: Sequence[Prompt],
        take: Callable[[int, Result], None],
        *,
        seeds: Sequence[int] | None = None,
        **fields: Unpack[Fields],
    ) -> None:
        """Run `generate_many`, and give `take` the place of a prompt and its result as each comes; none is kept.

        What `take` raises ends the call.
        """
        if isinstance(prompts, str | bytes):
            raise RequestError("'prompts' is one text: expected a list of prompts", field="prompts")
        if not len(prompts):  # it may be an array
            return
        if seeds is not None and len(seeds) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but {len(seeds)} seeds", field="seeds")
        waiter, options = EachResult(len(prompts), take), self._make_options(fields, stream=False)
        pendings: list[Pending] = []
        try:
            for place, prompt in enumerate(prompts):
                seed = None if seeds is None else seeds[place]
                pendings.append(self._add(prompt, seed, options, waiter, place))
            await waiter.future
        except BaseException:
            self._abandon(pendings)
            raise

    async def stream(
        self, prompt: Prompt, *, seed: int | None = None, **fields: Unpack[Fields]
    ) -> AsyncGenerator[Event, None]:
        """Yield the tokens of all samples as they come. Leaving the loop early cancels the request.

        Raises:
            RequestError: as `generate`.
            ConnectionLostError: the client was closed, or the server lost the session of a begun stream.
        """
        waiter = RequestEvents()
        pending = self._add(prompt, seed, self._make_options(fields, stream=True), waiter)
        num_open = max(1, pending.options.n)  # a wrong n is answered by an error
        try:
            while num_open:
                event = await waiter.next()
                num_open -= event.finish_reason is not None
                yield event
        finally:
            self._abandon([pending])

    def _make_options(self, fields: Mapping[str, Any], *, stream: bool) -> RequestOptions:
        if "stream" in fields:
            raise RequestError("'stream' is no field of a request: call `stream`", field="stream")
        encoded = encode({**fields, "stream": True} if stream else fields)
        options = self._options.get(encoded)
        if options is None:
            check_depth(fields)
            if len(self._options) >= MOST_OPTIONS:
                self._options.clear()
            options = self._options[encoded] = RequestOptions(fields, encoded, stream)
        return options

    def _add(
        self, prompt: Prompt, seed: int | None, options: RequestOptions, waiter: Waiter, place: int = 0
    ) -> Pending:
        if not self._is_open:
            raise ConnectionLostError("the client is closed: requests go inside of `with`")
        if self._exchange.refused is not None:
            raise ConnectionLostError(self._exchange.refused)
        key, self._next_id = self._next_id, self._next_id + 1
        pending = Pending(key, convert_prompt(prompt), self._seed(seed), options, waiter, place)
        self._exchange.add(pending)
        self._wake()
        return pending

    def _seed(self, seed: int | None) -> int:
        """A seed within range, random if none is given. Raises RequestError."""
        if seed is None:
            return self._random.getrandbits(63)
        try:
            value = index(seed)
        except TypeError:
            raise RequestError(f"'seed': expected int, got {type(seed).__name__}", field="seed") from None
        if not -(2**63) <= value < 2**63:
            raise RequestError("'seed' has more than 64 bits", field="seed")
        return value

    def _abandon(self, pendings: Sequence[Pending]) -> None:
        for pending in pendings:
            self._exchange.abandon(pending)
        if not self._dealer.socket.closed:
            self._wake()


def encode(fields: Mapping[str, Any]) -> bytes:
    """Encode fields for the wire. Raises RequestError that names the field at fault."""
    try:
        return _ENCODER.encode(fields)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        if len(fields) > 1:
            for name, value in fields.items():
                encode({name: value})
        name = next(iter(fields))
        raise RequestError(f"'{name}' cannot be sent: {error}", field=name) from None


def check_depth(fields: Mapping[str, Any]) -> None:
    """Raise RequestError for fields that the server could not decode: it could not tell whose request it is."""
    for name, value in fields.items():
        if is_deep(value, MOST_DEPTH):
            raise RequestError(f"'{name}' is nested too deeply", field=name)


def is_deep(value: object, most: int) -> bool:
    if not isinstance(value, list | tuple | dict):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return not most or any(is_deep(part, most - 1) for part in parts)


def convert_prompt(prompt: Prompt) -> Int32 | bytes:
    """Convert a prompt for the wire. Raises RequestError for anything but text and token ids."""
    if isinstance(prompt, str):
        try:
            return prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"'prompt' is no text: {error.reason}", field="prompt") from None
    try:
        ids = np.asarray(prompt)
    except (ValueError, OverflowError):
        ids = NOT_IDS
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise RequestError("'prompt' must be text, or token ids", field="prompt")
    if ids.dtype == np.int32:
        return ids
    if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= 2**31):
        raise RequestError("'prompt' has a token id out of range", field="prompt")
    return ids.astype(np.int32)
