"""Backends of models in which some layers have attention and others a recurrent state."""

from __future__ import annotations

from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.base import (
    AttentionBackend,
    AttentionBatch,
    ChunkRows,
    GraphAttention,
    MixedAttention,
    PrefixGroup,
    QueryKeyNorm,
)
from toka_async.attention.states.ops import GraphStateOps, StateOps


class StateBackend:
    """An `AttentionBackend` that plans both for a step."""

    def __init__(self, attention: AttentionBackend, states: StateOps) -> None:
        self.attention = attention
        self.states = states

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


class GraphStateBackend(StateBackend):
    """A `GraphAttention`."""

    def __init__(self, attention: GraphAttention, states: GraphStateOps) -> None:
        super().__init__(attention, states)
        self._attention, self._states = attention, states

    def plan_graph(self, batch: AttentionBatch, grouped: bool) -> None:
        self._attention.plan_graph(batch, grouped)
        self._states.plan_graph(batch)

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        self._attention.set_groups(groups)


class MixedStateBackend(StateBackend):
    """A `MixedAttention`, whose first cells are those of the states."""

    def __init__(self, attention: MixedAttention, states: GraphStateOps) -> None:
        super().__init__(attention, states)
        self._attention, self._states = attention, states

    def count_chunk_cells(self, num_tokens: int, num_rows: int) -> int:
        of_states = self._states.count_cells(num_tokens, num_rows)
        return of_states + self._attention.count_chunk_cells(num_tokens, num_rows)

    def describe_chunks(self, cells: Int32, chunks: ChunkRows) -> None:
        of_states = self._states.count_cells(chunks.num_tokens, chunks.num_rows)
        self._states.describe(cells[:of_states], chunks)
        self._attention.describe_chunks(cells[of_states:], chunks)

    def plan_mixed(self, batch: AttentionBatch, grouped: bool, chunks: Tensor) -> None:
        of_states = self._states.count_cells(len(batch.write_indices), batch.num_decode)
        self._states.plan_mixed(batch, chunks[:of_states])
        self._attention.plan_mixed(batch, grouped, chunks[of_states:])

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        self._attention.set_groups(groups)
