"""The clients without asyncio: run `Client` or `Pool` in an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from toka_async.client.addresses import Addresses
from toka_async.client.base_client import CLOSED, BaseClient, Prompt
from toka_async.client.client import Client
from toka_async.client.errors import ConnectionLostError, RequestError
from toka_async.client.fields import Fields
from toka_async.client.pool import MOST_LOST, REFRESH, Pool
from toka_async.client.results import Event, Result

T = TypeVar("T")


class BaseSyncClient:
    """The methods of `SyncClient` and `SyncPool`, for any number of threads."""

    def __init__(self, client: BaseClient) -> None:
        self._client = client
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # no call reaches the loop after the order to stop

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="toka-client", daemon=True)
        self._thread.start()
        try:
            self._run(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run(self._client.__aexit__(kind, error, at))
        self._stop()

    def _stop(self) -> None:
        self._run(self._loop.shutdown_default_executor())
        assert self._thread is not None
        with self._lock:
            thread, self._thread = self._thread, None
            self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join()
        self._loop.close()

    def _work(self) -> None:
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)  # calls that other threads made during the close
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))

    def start(self, call: Callable[[BaseClient], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start what `call` does with the asyncio client, in the client's own loop. Cancelling the future cancels it.

        Raises ConnectionLostError if the client is closed.
        """
        return self._start(call(self._client))

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._thread is not None:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise ConnectionLostError(CLOSED)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self._start(coroutine)
        try:
            return future.result()
        except (ConnectionLostError, RequestError) as error:
            raise error.with_traceback(None) from None  # without the client's inner frames
        except CancelledError:
            raise ConnectionLostError(CLOSED) from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def generate(self, prompt: Prompt, *, seed: int | None = None, **fields: Unpack[Fields]) -> Result:
        """See `Client.generate`."""
        return self._run(self._client.generate(prompt, seed=seed, **fields))

    def generate_many(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int] | None = None, **fields: Unpack[Fields]
    ) -> list[Result]:
        """See `Client.generate_many`."""
        return self._run(self._client.generate_many(prompts, seeds=seeds, **fields))

    def stream(self, prompt: Prompt, *, seed: int | None = None, **fields: Unpack[Fields]) -> Iterator[Event]:
        """See `Client.stream`."""
        queue: SimpleQueue[Event | Exception | None] = SimpleQueue()

        async def run() -> None:
            try:
                async for event in self._client.stream(prompt, seed=seed, **fields):
                    queue.put(event)
                queue.put(None)
            except asyncio.CancelledError:
                queue.put(ConnectionLostError(CLOSED))
                raise
            except Exception as error:
                queue.put(error)

        with closing(_Task(self._start(run()))):
            while (item := queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item


class _Task:
    """A running stream; closing it cancels the rest."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def close(self) -> None:
        self._future.cancel()


class SyncClient(BaseSyncClient):
    """Like `Client`, for any number of threads."""

    def __init__(
        self,
        url: str,
        *,
        key: Path | str | None = None,
        server_key: Path | str | None = None,
        timeout: float | None = None,
        max_message_mb: int = 1024,
    ) -> None:
        super().__init__(Client(url, key=key, server_key=server_key, timeout=timeout, max_message_mb=max_message_mb))


class SyncPool(BaseSyncClient):
    """Like `Pool`, for any number of threads."""

    def __init__(
        self,
        addresses: Addresses,
        *,
        key: Path | str | None = None,
        server_key: Path | str | None = None,
        timeout: float | None = None,
        max_message_mb: int = 1024,
        max_samples: int | None = None,
        max_lost: int = MOST_LOST,
        refresh: float = REFRESH,
    ) -> None:
        pool = Pool(
            addresses,
            key=key,
            server_key=server_key,
            timeout=timeout,
            max_message_mb=max_message_mb,
            max_samples=max_samples,
            max_lost=max_lost,
            refresh=refresh,
        )
        super().__init__(pool)
