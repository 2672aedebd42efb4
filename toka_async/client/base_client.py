"""The methods of every asyncio client: requests from their arguments, and waiting for their answers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from operator import index
from random import Random
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Int32
from toka_async.client.errors import RequestError
from toka_async.client.fields import Fields, check_depth, encode
from toka_async.client.pending import EachResult, OneResult, Pending, RequestEvents, RequestOptions, Waiter
from toka_async.client.results import Event, Result

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]
MOST_OPTIONS = 256  # kept in the cache
NOT_IDS = np.empty((0, 0))
TIMEOUT = 10.0  # seconds for the first connection
CLOSED = "the client is closed: requests go inside of `with`"


class BaseClient(ABC):
    """What `Client` and `Pool` have in common."""

    def __init__(self) -> None:
        self._next_id = 0
        self._random = Random()
        self._options: dict[bytes, RequestOptions] = {}

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def _submit(self, pending: Pending) -> None:
        """Begin a request. Raises ConnectionLostError."""

    @abstractmethod
    def _abandon(self, pendings: Sequence[Pending]) -> None:
        """Stop waiting for requests, and cancel those that have not ended."""

    async def generate(self, prompt: Prompt, *, seed: int | None = None, **fields: Unpack[Fields]) -> Result:
        """Generate all samples of a prompt: text, or token ids. An int32 array is not copied and must not change
        meanwhile.

        Raises:
            RequestError: the server refuses the request; names the field.
            ConnectionLostError: the client was closed, or no replica of a pool finished the request.
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
        key, self._next_id = self._next_id, self._next_id + 1
        pending = Pending(key, convert_prompt(prompt), self._seed(seed), options, waiter, place)
        self._submit(pending)
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
