"""A backend of models in which some layers have attention and others a recurrent state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from toka_async.attention.base import AttentionBackend, AttentionBatch, GraphAttention, PrefixGroup, QueryKeyNorm
from toka_async.attention.states.ops import StateOps


@dataclass(slots=True, frozen=True)
class StateBackend:
    """An `AttentionBackend` that plans both for a step, and a `GraphAttention` where `graphs` is one."""

    attention: AttentionBackend
    states: StateOps
    graphs: GraphAttention | None = None

    def plan(self, batch: AttentionBatch) -> None:
        self.attention.plan(batch)
        self.states.plan(batch)

    def attend(
        self,
        layer: int,
        heads: Tensor,
        rotation: tuple[Tensor, Tensor],
        norm: QueryKeyNorm | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self.attention.attend(layer, heads, rotation, norm, sinks)

    def plan_graph(self, batch: AttentionBatch, grouped: bool) -> None:
        assert self.graphs is not None
        self.graphs.plan_graph(batch, grouped)
        self.states.plan_graph(batch)

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        assert self.graphs is not None
        self.graphs.set_groups(groups)
