"""Builds what computes the recurrent layers of a model, where it has some."""

from __future__ import annotations

from dataclasses import replace

import torch

from toka_async.attention.build import BuiltAttention
from toka_async.attention.states.backend import GraphStateBackend, MixedStateBackend, StateBackend
from toka_async.attention.states.cache import StateCache
from toka_async.attention.states.ops import GraphStateOps
from toka_async.attention.states.torch_ops import TorchStateOps
from toka_async.checkpoint.spec import ModelSpec
from toka_async.kernels.delta.layer import DeltaShape
from toka_async.kernels.support import explain_no_kernels


def explain_no_states(device: torch.device, batch_invariant: bool) -> str:
    """Explains why recurrent layers cannot be computed so, and the fix; empty if they can."""
    if batch_invariant:
        return (
            "model.batch_invariant=true: recurrent layers compute a prompt in pieces that depend on the other rows of "
            "a step; use false"
        )
    reason = explain_no_kernels(device) if device.type == "cuda" else ""
    return f"recurrent layers need our kernels on a GPU: {reason}" if reason else ""


def build_states(
    spec: ModelSpec, max_seqs: int, num_snapshots: int, dtype: torch.dtype, device: torch.device, can_sleep: bool
) -> StateCache | None:
    """Builds the states of a rank's layers, see `StateCache`; None: they have none."""
    if not spec.recurrences:
        return None
    first = spec.recurrences[0]
    shape = DeltaShape(first.num_key_heads, first.num_value_heads, first.key_dim, first.value_dim, first.width)
    stored = getattr(torch, first.state_dtype)
    return StateCache(shape, len(spec.recurrences), max_seqs, num_snapshots, dtype, device, can_sleep, stored)


def add_states(attention: BuiltAttention, states: StateCache) -> BuiltAttention:
    """Adds what computes with the states, on a GPU by kernels that can be captured."""
    if states.device.type != "cuda":
        return replace(attention, backend=StateBackend(attention.backend, TorchStateOps(states)))
    from toka_async.attention.states.triton_ops import TritonStateOps

    return add_graph_states(attention, TritonStateOps(states))


def add_graph_states(attention: BuiltAttention, ops: GraphStateOps) -> BuiltAttention:
    """Adds what computes with the states, also in the steps whose attention is captured."""
    graphs, mixed = attention.graphs, attention.mixed
    return replace(
        attention,
        backend=StateBackend(attention.backend, ops),
        graphs=None if graphs is None else GraphStateBackend(graphs, ops),
        mixed=None if mixed is None else MixedStateBackend(mixed, ops),
    )
