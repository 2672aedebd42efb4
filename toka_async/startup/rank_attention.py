"""Builds the attention of a rank's layers: a backend for each kind of layer, joined if there are several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toka_async.attention.build import AttentionParts, Backend, BuiltAttention, build_attention
from toka_async.attention.choice import ChoiceTable
from toka_async.attention.invariant.backend import build_invariant_attention
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.layered.backend import join_attention
from toka_async.bar import Show
from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import ModelSpec


@dataclass(slots=True, frozen=True)
class AttentionSetup:
    """What is common to all layers; see `build_attention`. invariant: a token's bits do not depend on its batch."""

    backend: Backend
    invariant: bool
    limits: RankLimits
    choose: Callable[[AttentionParts], ChoiceTable] | None
    with_flashinfer: bool
    show: Show


def build_rank_attention(spec: ModelSpec, caches: Sequence[KVCache], setup: AttentionSetup) -> BuiltAttention:
    """spec: of the rank's layers. caches: of each of its `attention_kinds`. Raises ModelError as `build_attention`."""
    kinds = spec.attention_kinds
    parts = [
        _build(kind, [spec.windows[layer] for layer in layers], cache, setup)
        for (kind, layers), cache in zip(kinds.items(), caches, strict=True)
    ]
    return join_attention(parts, list(kinds.values()), [cache.of_windows for cache in caches])


def _build(kind: AttentionSpec, windows: Sequence[int], cache: KVCache, setup: AttentionSetup) -> BuiltAttention:
    limits = setup.limits
    if setup.invariant:
        return build_invariant_attention(
            setup.backend, cache, kind.num_heads, windows, limits.max_seqs, kind.scale, kind.soft_cap
        )
    return build_attention(
        setup.backend,
        cache,
        kind.num_heads,
        windows,
        max_seqs=limits.max_seqs,
        max_tokens=limits.max_tokens,
        scale=kind.scale,
        soft_cap=kind.soft_cap,
        choose=setup.choose,
        with_flashinfer=setup.with_flashinfer,
        show=setup.show,
        has_sinks=kind.sinks,
    )
