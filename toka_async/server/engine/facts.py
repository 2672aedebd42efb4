"""What clients may know of how the model is run."""

from __future__ import annotations

from dataclasses import dataclass

from toka_async.config import Config, ParallelConfig
from toka_async.messages import Ready


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """parallel: how the model is divided. caches_prefixes: prompts are found in the cache. may_update: the routes that
    change the weights are open.
    """

    parallel: ParallelConfig
    caches_prefixes: bool
    may_update: bool

    @property
    def ranks_per_replica(self) -> int:
        return self.parallel.tp * self.parallel.pp

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_replica * self.parallel.dp


def facts_of(config: Config) -> EngineFacts:
    return EngineFacts(config.parallel, config.cache.prefix, config.server.admin)


def name_dtype(ready: Ready) -> str:
    """Returns the type that the model computes in; float32 where nothing is computed."""
    return next((rank.dtype.partition(",")[0] for rank in ready.ranks if rank.dtype), "float32")
