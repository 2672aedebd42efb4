"""The endpoint of direct submission with the fake scheduler behind it: on a real socket, or on none at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from tests.cases.tokenizers import byte_level
from tests.drivers.config import make_config
from tests.drivers.until import SECONDS
from tests.drivers.until import turns as turns
from tests.fakes.scheduler import FakeScheduler
from toka_async.checkpoint.generation import GenerationDefaults
from toka_async.config import Config
from toka_async.messages import Submits
from toka_async.procs.direct import DirectServer
from toka_async.protocol import VERSIONS, Columns, FromServer, Header, Hello, Results, Submission, from_server, pack
from toka_async.server.app import create_app
from toka_async.server.engine.engine import Engine
from toka_async.server.generate.service import Service
from toka_async.server.http.respond import SERVICE
from toka_async.server.zmq.endpoint import Endpoint

H = TypeVar("H", bound=Header)
SESSION = b"0123456789abcdef"


def make_service(scheduler: FakeScheduler, config: Config) -> Service:
    engine = Engine([scheduler], config.limits.max_requests)
    app = create_app(config, "tiny", byte_level(), None, GenerationDefaults(), engine)
    service = app[SERVICE]
    scheduler.start(engine.on_messages)
    return service


@dataclass
class World:
    """A listening endpoint."""

    scheduler: FakeScheduler
    service: Service
    server: DirectServer

    @property
    def url(self) -> str:
        return self.server.endpoint.address

    @property
    def engine(self) -> Engine:
        return self.service.engine


@asynccontextmanager
async def direct_server(
    scheduler: FakeScheduler | None = None, bind: str = "tcp://127.0.0.1:*", **config: Any
) -> AsyncIterator[World]:
    """`config` are fields as `make_config` takes them."""
    scheduler, settings = scheduler or FakeScheduler(), make_config(zmq_bind=bind, **config)
    service = make_service(scheduler, settings)
    server = DirectServer(settings.zmq, service, takes_commands=settings.server.admin)
    try:
        yield World(scheduler, service, server)
    finally:
        await server.close(0.0)
        service.executor.shutdown()


@dataclass
class Wire:
    """What the endpoint takes for its socket.

    sent: header and columns, by connection. gone: broken connections. kept: those that are wanted.
    """

    sent: dict[bytes, list[tuple[FromServer, Columns]]] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)
    kept: set[bytes] = field(default_factory=set)
    deliver: Callable[[list[bytes]], None] = print
    address: str = "nowhere"
    sender: str = ""

    def attach(self, loop: asyncio.AbstractEventLoop, on_frames: Callable[[list[bytes]], None]) -> None:
        del loop
        self.deliver = on_frames

    def send(self, frames: Sequence[bytes]) -> bool:
        identity = bytes(frames[0])
        if identity in self.gone:
            return False
        self.sent.setdefault(identity, []).append(from_server([bytes(frame) for frame in frames[1:]]))
        return True

    def keep(self, name: bytes) -> None:
        self.kept.add(name)

    def release(self, name: bytes) -> None:
        self.kept.discard(name)

    def cut(self, name: bytes) -> None:
        self.gone.add(name)

    @property
    def num_connections(self) -> int:
        return len(self.sent)

    def close(self, linger: int = 0) -> None:
        del linger


@dataclass
class Bare:
    """An endpoint without a socket, and what clients say and hear."""

    wire: Wire
    endpoint: Endpoint
    service: Service
    scheduler: FakeScheduler

    def say(self, header: Header, columns: Columns | None = None, *, identity: bytes = b"one") -> None:
        self.wire.deliver([identity, *(bytes(frame) for frame in pack(header, columns))])

    def hello(self, *, session: bytes = SESSION, identity: bytes = b"one", received: int = 0) -> None:
        self.say(Hello(versions=VERSIONS, session=session, received=received), identity=identity)

    def submit(
        self, *ids: int, prompt: Sequence[int] = (1, 2, 3), identity: bytes = b"one", ack: int = 0, **fields: Any
    ) -> None:
        columns: Columns = {
            "ids": np.asarray(ids, np.int64),
            "lengths": np.full(len(ids), len(prompt), np.int32),
            "prompts": np.asarray(list(prompt) * len(ids), np.int32),
            "seeds": np.asarray(ids, np.int64),
        }
        raw = msgspec.Raw(msgspec.msgpack.encode({"text": False, **fields}))
        self.say(Submission(fields=raw, ack=ack, columns=tuple(columns)), columns, identity=identity)

    def heard(self, kind: type[H], identity: bytes = b"one") -> list[tuple[H, Columns]]:
        """All messages of a kind up to now."""
        messages = self.wire.sent.get(identity, [])
        return [(header, columns) for header, columns in messages if isinstance(header, kind)]

    def ended(self, identity: bytes = b"one") -> list[int]:
        """Ids of rows with a reason, in order of arrival."""
        pairs = self.heard(Results, identity)
        return [int(i) for _, c in pairs for i, r in zip(c["ids"], c["reasons"], strict=True) if r]


@contextmanager
def bare_endpoint(scheduler: FakeScheduler | None = None, **config: Any) -> Iterator[Bare]:
    """Needs a running event loop, or one that is set."""
    scheduler, settings = scheduler or FakeScheduler(held=True), make_config(**config)
    wire, service = Wire(), make_service(scheduler, settings)
    endpoint = Endpoint(wire, service, settings.zmq)  # type: ignore[arg-type]
    try:
        yield Bare(wire, endpoint, service, scheduler)
    finally:
        service.executor.shutdown()


async def run(bare: Bare, steps: int = 20) -> None:
    for _ in range(steps):
        bare.scheduler.step()
        await turns()


def ids_column(*ids: int) -> Columns:
    return {"ids": np.asarray(ids, np.int64)}


def runs(scheduler: FakeScheduler) -> int:
    """Requests that the scheduler was sent."""
    return sum(len(message.request_ids) // 4 for message in scheduler.log if isinstance(message, Submits))


async def wait_for_runs(scheduler: FakeScheduler, count: int) -> None:
    """Steps meanwhile."""
    async with asyncio.timeout(SECONDS):
        while runs(scheduler) < count:
            await asyncio.sleep(0.002)
            scheduler.step()
