"""How busy a server is, as one JSON object. Knows the engine's counts."""

from __future__ import annotations

from typing import Literal

import msgspec

from toka_async.server.engine.engine import Engine
from toka_async.server.engine.metrics import usage


def show_load(engine: Engine) -> None:
    """From now on it is in the engine's metrics."""
    watch = engine.metrics.watch_gauge
    watch("requests_held", "requests (one a prompt) that have not ended", lambda: engine.num_requests)
    watch("requests_held_max", "more are refused: limits.max_requests", lambda: engine.max_requests)
    watch("zmq_requests_held", "of these: by direct submission, ids in and out", lambda: engine.requests.num_accounted)
    engine.metrics.watch_memory(engine.memory)
    watch("processes_silent", "processes that have not answered lately: 0, or one hangs", lambda: len(engine.silent))


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    replica: int
    state: Literal["up", "starting", "lost"]
    running: int
    waiting: int
    outstanding_tokens: int
    kv_cache_usage: float


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """All together, then each replica; sequences (samples) run and wait, requests (prompts) are held.

    `outstanding_tokens` is what requests may still have to compute: prompts, and `max_tokens` of every open sample.
    """

    requests: int
    max_requests: int
    running: int
    waiting: int
    outstanding_tokens: int
    kv_cache_usage: float
    replicas: list[ReplicaLoad]


def load_of(engine: Engine) -> ServerLoad:
    """As of now, where the schedulers were asked before (`Replicas.refresh`)."""
    outstanding = engine.replicas.router.outstanding
    each = [
        ReplicaLoad(
            replica=index,
            state="up" if replica.lost is None and replica.ready else "lost" if replica.lost else "starting",
            running=replica.stats.num_running,
            waiting=replica.stats.num_waiting,
            outstanding_tokens=int(tokens),
            kv_cache_usage=usage(replica.stats),
        )
        for index, (replica, tokens) in enumerate(zip(engine.replicas.replicas, outstanding, strict=True))
    ]
    stats = engine.stats
    return ServerLoad(
        requests=engine.num_requests,
        max_requests=engine.max_requests,
        running=stats.num_running,
        waiting=stats.num_waiting,
        outstanding_tokens=sum(int(tokens) for tokens in outstanding),
        kv_cache_usage=usage(stats),
        replicas=each,
    )
