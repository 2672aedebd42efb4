"""The asyncio client of many replicas, each a server of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

import zmq

from toka_async.client.addresses import Addresses, AddressSource
from toka_async.client.base_client import CLOSED, TIMEOUT, BaseClient
from toka_async.client.connection import ConnectionOptions, ZmqContext
from toka_async.client.dispatcher import Dispatcher
from toka_async.client.errors import ConnectionLostError
from toka_async.client.pending import Pending
from toka_async.client.pool_replica import PoolReplica

logger = logging.getLogger(__name__)

MOST_LOST = 3
REFRESH = 5.0
MOST_SOCKETS = 1 << 16  # of the context; a replica needs three
MOST_NAMED = 3  # replicas in an error


@dataclass(frozen=True, slots=True)
class PooledReplica:
    """A replica as its pool sees it. samples: open there. problem: why it is not connected."""

    url: str
    is_connected: bool
    samples: int
    problem: str | None


class Pool(BaseClient):
    """Requests to many replicas that serve one model: the methods of `Client`.

    Requests wait here, and replicas get them when they have room. When a replica is lost, its requests begin again
    elsewhere with the same seed, except streams of which a part was delivered: these end with ReplicaLostError.

    Args:
        addresses: see `AddressSource`.
        key, server_key, max_message_mb: see `Client`.
        timeout: seconds to wait for the first replica. None: 10, but only until each replica has failed once.
        max_samples: open at once at a replica; see `PoolReplica`. Pools that share replicas share this number.
        max_lost: replicas that a request may lose before it ends with ReplicaLostError.
        refresh: seconds between two looks at a file, a name or a function. Added replicas get requests at once, removed
            ones get no more, and finish those that they have.

    Raises:
        ConnectionLostError: no replica could be reached (on entering the context).
        KeyFileError: a key file is missing or wrong.
    """

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
        super().__init__()
        if max_samples is not None and max_samples < 1:
            raise ValueError("max_samples: expected 1 or more")
        self._source = AddressSource(addresses)
        self._connection_options = ConnectionOptions.read(key, server_key, max_message_mb)
        self._timeout = timeout
        self._max_samples = max_samples
        self._max_lost = max_lost
        self._refresh = refresh
        self._replicas: dict[str, PoolReplica] = {}
        self._draining: list[PoolReplica] = []
        self._is_open = self._is_pulling = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._context: ZmqContext = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)
        self._dispatcher = Dispatcher(self._max_lost, Random(), self._wake)
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._is_open = True
        try:
            await self._connect()
        except BaseException:
            await self._close()
            raise
        return self

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(TIMEOUT if self._timeout is None else self._timeout):
                self._update(await self._source.find())
                if not self._source.is_fixed:
                    self._watching = asyncio.create_task(self._watch())
                while not self._has_settled():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        except Exception as error:  # a function may raise anything
            raise ConnectionLostError(f"the addresses of the replicas cannot be found: {error}") from error
        if not any(each.is_joined for each in self._replicas.values()):
            named = list(self._replicas.values())[:MOST_NAMED]
            problems = "; ".join(f"{each.url}: {each.problem or 'nobody answers'}" for each in named)
            of_all = f"no connection to any of {len(self._replicas)} replicas"
            raise ConnectionLostError(f"{of_all}, such as {problems}" if named else "there are no replicas")

    def _has_settled(self) -> bool:
        replicas = self._replicas.values()
        is_lost = self._timeout is None and all(each.problem is not None for each in replicas)
        return is_lost or any(each.is_joined for each in replicas)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._is_open = False
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        self._dispatcher.fail_all(ConnectionLostError("the client was closed"))
        for replica in [*self._replicas.values(), *self._draining]:
            replica.close()
        self._replicas.clear()
        self._draining.clear()
        await self._loop.run_in_executor(None, self._context.term)

    # ---- replicas ----------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[PooledReplica]:
        """The replicas of the newest list of addresses."""
        return [PooledReplica(each.url, each.is_joined, each.samples, each.problem) for each in self._replicas.values()]

    @property
    def num_late(self) -> int:
        """Results that came after their request had begun again elsewhere; they were dropped."""
        return self._dispatcher.num_late

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._refresh)
            try:
                self._update(await self._source.find())
            except Exception as error:
                logger.warning("the addresses of the replicas cannot be found, the last ones stay: %s", error)

    def _update(self, urls: Sequence[str]) -> None:
        gone = self._replicas.keys() - set(urls)
        for url in gone:
            self._draining.append(replica := self._replicas.pop(url))
            replica.drain()
        for url in urls:
            if url not in self._replicas:
                replica = PoolReplica(
                    url,
                    self._context,
                    self._connection_options,
                    self._dispatcher,
                    self._max_samples,
                    self._on_change,
                )
                self._replicas[url] = replica
                replica.connect()

    def _on_change(self) -> None:
        self._draining = [each for each in self._draining if not each.is_closed]
        self._changed.set()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _submit(self, pending: Pending) -> None:
        if not self._is_open:
            raise ConnectionLostError(CLOSED)
        self._dispatcher.submit(pending)

    def _abandon(self, pendings: Sequence[Pending]) -> None:
        if self._is_open:
            self._dispatcher.abandon(pendings)

    def _wake(self) -> None:
        """Let replicas pull soon, once for everything that one turn of the loop brings."""
        if not self._is_pulling:
            self._is_pulling = True
            self._loop.call_soon(self._pull)

    def _pull(self) -> None:
        self._is_pulling = False
        if self._is_open:
            self._dispatcher.pull()
