"""Attention's parts that compute nothing and say what a step of theirs would take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from toka_async.attention.base import AttentionBatch, PrefixGroup

Cost = Callable[[AttentionBatch, tuple[PrefixGroup, ...]], float]


@dataclass(slots=True)
class FakePart:
    """Both kinds of part; `cost` says what a step would take."""

    cost: Cost
    spent: list[float]
    batches: list[AttentionBatch] = field(default_factory=list)
    groups: tuple[PrefixGroup, ...] = ()

    def plan(self, batch: AttentionBatch, *more: tuple[PrefixGroup, ...] | int) -> None:
        groups = more[0] if len(more) == 2 else ()
        assert isinstance(groups, tuple)
        self.groups = groups
        self.batches.append(batch)

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:  # noqa: ARG002
        assert layer in (0, 1)
        assert query.shape == output.shape == (self.batches[-1].query_lengths.sum(), 4, 8)
        self.spent.append(self.cost(self.batches[-1], self.groups))
