"""The data of the page as one JSON object. Knows the engine's counts, not how they are shown."""

from __future__ import annotations

import msgspec

import toka_async
from toka_async.messages import Ready
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.load import ServerLoad, load_of
from toka_async.server.generate.service import Service
from toka_async.server.limits.jobs import NotServingError
from toka_async.server.page.history import PageHistory, ReplicaHistory


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's device; bytes of its memory, where known. `used` is the rank's part, with weights and cache."""

    rank: int
    device: str
    dtype: str
    weights: int
    cache: int
    used: int
    free: int
    total: int


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """problem: why a replica is away, if it is. restarts: how often it was lost."""

    problem: str | None
    restarts: int
    num_pages: int
    max_seqs: int
    generated_tokens: int
    devices: list[DeviceState]


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """temperature: the default of requests. Numbers are 0 until the engine is ready."""

    name: str
    has_chat: bool
    temperature: float
    max_context: int
    vocab_size: int
    page_size: int


class PageState(msgspec.Struct, frozen=True, kw_only=True):
    """now: time of the history's clock, which begins anew with another `started` (seconds since 1970)."""

    version: str
    started: int
    now: int
    problem: str | None
    has_batches: bool
    max_n: int
    model: ServedModel
    load: ServerLoad
    replicas: list[ReplicaState]
    history: PageHistory


def page_state(service: Service, history: ReplicaHistory, after: int, *, has_batches: bool) -> PageState:
    """Returns the present state, and the history later than `after`."""
    engine = service.engine
    ready = engine.ready or Ready(num_pages=0, page_size=0, max_seqs=0, max_context=0, vocab_size=0)
    return PageState(
        version=toka_async.__version__,
        started=service.created,
        now=history.now,
        problem=find_problem(engine),
        has_batches=has_batches,
        max_n=service.config.max_n,
        model=ServedModel(
            name=service.name,
            has_chat=service.chat_template is not None,
            temperature=service.defaults.temperature,
            max_context=ready.max_context,
            vocab_size=ready.vocab_size,
            page_size=ready.page_size,
        ),
        load=load_of(engine),
        replicas=[replica_state(engine, index) for index in range(len(engine.replicas.replicas))],
        history=history.since(after),
    )


def find_problem(engine: Engine) -> str | None:
    """Returns why the engine is not fully healthy."""
    try:
        engine.check_whole()
    except NotServingError as error:
        return str(error)
    return None


def replica_state(engine: Engine, index: int) -> ReplicaState:
    replica = engine.replicas.replicas[index]
    ready = replica.ready
    return ReplicaState(
        problem=replica.lost,
        restarts=replica.life,
        num_pages=ready.num_pages if ready else 0,
        max_seqs=ready.max_seqs if ready else 0,
        generated_tokens=replica.past.generated_tokens + replica.stats.generated_tokens,
        devices=[] if ready is None else device_states(engine, index, ready),
    )


def device_states(engine: Engine, index: int, ready: Ready) -> list[DeviceState]:
    """Combines what the ranks said of their devices at the start with their last word on memory."""
    states = []
    for rank in ready.ranks:
        _, used, _ = engine.memory.get(f"rank-{index}-{rank.rank}", (0, rank.used, 0))
        states.append(
            DeviceState(
                rank=rank.rank,
                device=rank.device,
                dtype=rank.dtype,
                weights=rank.weights,
                cache=rank.cache,
                used=used,
                free=max(0, rank.free - (used - rank.used)),
                total=rank.total,
            )
        )
    return states
