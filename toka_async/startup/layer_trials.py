"""Compiles what is between a layer's matrices and its attention, and what begins a step, by running it on zeros."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from toka_async.attention.kv_cache import CacheFormat, KVCache
from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.experts_spec import ExpertsFeedSpec
from toka_async.checkpoint.foreign_spec import ForeignFeedSpec
from toka_async.checkpoint.spec import ModelSpec
from toka_async.kernels.append import append
from toka_async.kernels.decode_rows import begin_rows
from toka_async.kernels.experts.gate import open_gate
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.launches.pdl import list_row_counts
from toka_async.runner.device_rows import DeviceRows


def list_layer_trials(
    spec: ModelSpec, dtype: torch.dtype, stored: torch.dtype, device: torch.device, page_size: int
) -> list[Callable[[], None]]:
    """Lists functions of which each compiles kernels of its own. They may run at the same time.

    spec: of the rank. stored: what the cache stores.
    """
    counts, ops, make = list_row_counts(device), FusedOps(), partial(torch.zeros, dtype=dtype, device=device)

    def append_rows(num_rows: int, attention: AttentionSpec) -> None:
        num_heads, num_kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        cache = KVCache(1, 1, num_kv_heads, page_size, dim, dtype, device, stored=CacheFormat(stored))
        heads, rotation = make(num_rows, num_heads + 2 * num_kv_heads, dim), make(num_rows, 1, dim)
        indices = torch.zeros(num_rows, dtype=torch.int64, device=device)
        norm = None
        if attention.head_norm is not None and attention.head_norm.over == "head":
            norm_dtype = torch.float32 if attention.head_norm.adds_one else dtype
            norm = make(num_heads + num_kv_heads, dim, dtype=norm_dtype)
        append(heads, (rotation, rotation), cache.keys[0], cache.values[0], indices, norm)

    def norm_rows(num_rows: int, adds: bool) -> None:
        x = make(num_rows, spec.hidden_size)
        weight = x[0].float() if spec.norm.adds_one else x[0]
        ops.add_norm(x, x if adds else None, weight, spec.norm.eps)

    def sum_squares(size: int) -> None:
        ops.sum_squares(make(1, 2 * size, dtype=torch.float32)[:, :size])  # they lie among others

    def gate_rows(num_rows: int, inner: int, activation: str) -> None:
        ops.gate(make(num_rows, 2 * inner), activation)

    def apply_gates(num_rows: int, width: int) -> None:
        ops.apply_gates(make(num_rows, width), make(num_rows, 2 * width)[:, :width])  # they lie among others

    def open_gates(num_rows: int) -> None:
        open_gate(make(num_rows, spec.hidden_size), make(1, spec.hidden_size))

    def rotate(dim: int) -> None:
        positions = torch.zeros(1, dtype=torch.int64, device=device)
        ops.compute_rotation(positions, torch.zeros(dim // 2, dtype=torch.float32, device=device), 1.0, dtype)

    def begin(order_dtype: torch.dtype, are_given: bool) -> None:
        rows = DeviceRows(1, page_size, 1, 0, device)
        zeros = torch.zeros(1, page_size, dtype=torch.int32, device=device)
        given = (zeros[0], zeros[0]) if are_given else None
        tables = rows.last_tokens, rows.positions, rows.page_table
        begin_rows(rows.order.to(order_dtype), *tables, page_size, zeros, given)

    own = [layer.feed for layer in spec.layers if not isinstance(layer.feed, ForeignFeedSpec)]
    inputs = [layer.input for layer in spec.layers if layer.input is not None]
    gated = {kind.num_heads * kind.head_dim for kind in spec.attention_kinds if kind.gated}
    whole = [
        kind for kind in spec.attention_kinds if kind.head_norm is not None and kind.head_norm.over == "projection"
    ]
    normed = {heads * kind.head_dim for kind in whole for heads in (kind.num_heads, kind.num_kv_heads)}
    has_expert_of_all = any(isinstance(feed, ExpertsFeedSpec) and feed.shared for feed in own)
    feeds = {(feed.inner, feed.activation) for feed in own} | {(each.size, each.activation) for each in inputs}
    return [
        *(partial(append_rows, count, kind) for count in counts for kind in spec.attention_kinds),
        *(partial(norm_rows, count, adds=False) for count in counts),
        partial(norm_rows, counts[-1], adds=True),
        *(partial(sum_squares, size) for size in sorted(normed)),
        *(partial(gate_rows, count, *feed) for count in counts for feed in sorted(feeds)),
        *(partial(apply_gates, count, width) for count in counts for width in sorted(gated)),
        *(partial(open_gates, count) for count in counts if has_expert_of_all),
        *(partial(rotate, dim) for dim in sorted({kind.head_dim for kind in spec.attention_kinds})),
        partial(begin, torch.int64, are_given=False),
        partial(begin, torch.int32, are_given=True),
    ]
