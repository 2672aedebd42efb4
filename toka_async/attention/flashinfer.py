"""Attention by FlashInfer (arXiv:2501.01005): decoding rows, chunks of prompts, and prefixes that rows share.

Plans are made on the host, from lengths known there. A group's prefix is attended once for all of its rows, without a
mask, and merged with their own parts by log-sum-exp (Hydragen, arXiv:2402.05099): computed in float32, of parts in the
model's dtype. The package is imported when a part is built. Knows the cache and rows, no model and no kernels of ours.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int64
from toka_async.attention.base import AttentionBatch, PrefixGroup
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.modules import TENSOR_CORE_GROUP
from toka_async.attention.query_tiles import QueryTiles, make_chunk_spans, make_decode_spans, make_prefix_spans
from toka_async.attention.wrappers import WrapperRing, put_paged_keys, put_query_bounds

HEAD_DIMS = (64, 128, 256)
WHOLE = 1 << 62  # cells of a span that is not cut
_MOST_TILE = 128  # queries of a tile that FlashInfer may split over keys
_WORK_BYTES = 28  # bytes of FlashAttention 3's schedule for each tile and head
_MOST_WORKS = 4096  # tiles beyond which all heads share one schedule
LEAST_ROWS = 512  # rows for which plans have room: trying out kernels takes more than small limits
_DEFAULT_SCHEDULE = 8 << 20  # bytes that a wrapper brings
_FAILED = re.compile(r"error:|not found|no such file|killed", re.IGNORECASE)
FAILURES = (ImportError, OSError, RuntimeError, ValueError)  # what it raises where it does not work


def explain_no_flashinfer(device: torch.device, dtype: torch.dtype, head_dim: int, soft_cap: float = 0.0) -> str:
    """Explains why FlashInfer cannot attend over such a cache, and the fix; empty if it can.

    soft_cap: of scores, see `AttentionSpec`.
    """
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed; pip install 'flashinfer-python<0.7', or use auto"
    if device.type != "cuda":
        return f"expected a CUDA device, got {device.type}; use auto"
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return f"expected model.dtype bfloat16 or float16, got {name}; use auto or triton"
    if head_dim not in HEAD_DIMS:
        return f"expected heads of 64, 128 or 256 dimensions, the model has {head_dim}; use auto or triton"
    if soft_cap:
        return "the model limits attention's scores (attn_logit_softcapping); use auto or triton"
    return ""


def explain_failure(error: Exception) -> str:
    """Explains in one line why FlashInfer failed: the first line that says so, as compilers write much around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if _FAILED.search(line)), lines[0])


@dataclass(slots=True, frozen=True)
class WrapperShape:
    """The common part of all plans. workspace: shared by the parts of one stream. max_seqs, max_tokens: of a batch."""

    cache: KVCache
    num_heads: int
    scale: float
    max_seqs: int
    max_tokens: int
    workspace: Tensor

    @property
    def backend(self) -> str:
        """The backend of prefill: FlashAttention 3 (arXiv:2407.08608) on compute capability 9.

        FlashAttention 3 takes keys in E4M3 only with queries in E4M3.
        """
        device, is_plain = self.cache.device, self.cache.keys[0].dtype == self.cache.dtype
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        return "fa3" if hopper and is_plain else "fa2"

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether decoding uses matrix products, which are as tall as a key head has query heads."""
        return self.num_heads // self.cache.num_kv_heads >= TENSOR_CORE_GROUP

    def plan(self, wrapper: Any, inputs: tuple[Tensor, ...], window: int, **settings: object) -> None:
        wrapper.plan(
            *inputs,
            self.num_heads,
            self.cache.num_kv_heads,
            self.cache.head_dim,
            self.cache.page_size,
            sm_scale=self.scale,
            window_left=window - 1,  # tokens before the newest; -1: all
            q_data_type=self.cache.dtype,
            kv_data_type=self.cache.keys[0].dtype,
            **settings,
        )

    def list_scales(self, layer: int) -> dict[str, float | None]:
        """Lists the scales of what is stored, as runs take them. None costs no kernel."""
        return {
            f"{name}_scale": None if scale == 1 else scale
            for name, scale in zip("kv", self.cache.scales[layer], strict=True)
        }


def make_workspace(cache: KVCache, num_heads: int) -> Tensor:
    """Makes room for partial results of split queries: at most two tiles a multiprocessor and key head."""
    device = cache.device
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    tiles = 2 * num_processors * (num_heads // cache.num_kv_heads)
    size = tiles * _MOST_TILE * (cache.head_dim + 1) * torch.float32.itemsize
    return torch.zeros(size + (16 << 20), dtype=torch.uint8, device=device)


class Prefill:
    """Attends runs of queries over paged keys: chunks of prompts, or the rows of a group over their prefix."""

    def __init__(self, shape: WrapperShape) -> None:
        self.shape = shape
        self.ring = WrapperRing(self._make, max(shape.max_seqs, LEAST_ROWS), shape.workspace.device)

    def plan(self, batch: AttentionBatch, spans: QueryTiles, window: int) -> Any:
        """Returns a wrapper that is ready to run."""
        wrapper, inputs = self.ring.take()
        columns = (put_query_bounds(inputs, spans), *put_paged_keys(inputs, batch, spans, self.shape.cache.page_size))
        most = int(spans.counts.max())  # otherwise FlashInfer looks for it row by row
        self.shape.plan(wrapper, columns, window, causal=spans.causal, max_token_per_sequence=most)
        inputs.seal()
        return wrapper

    def _make(self) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        shape = self.shape
        wrapper = BatchPrefillWithPagedKVCacheWrapper(shape.workspace, "HND", backend=shape.backend)
        works = min(_MOST_WORKS, -(-shape.max_tokens // _MOST_TILE) + shape.max_seqs) * shape.num_heads
        if works * _WORK_BYTES > _DEFAULT_SCHEDULE - (1 << 16):
            size = works * _WORK_BYTES + (1 << 16)
            schedule = torch.empty(size, dtype=torch.uint8, device=shape.workspace.device)
            wrapper.reset_workspace_buffer(shape.workspace, schedule)
        return wrapper


class FlashInferChunks:
    """`ChunkPart` for chunks of prompts, causal."""

    def __init__(self, shape: WrapperShape) -> None:
        self.shape = shape
        self.cache = shape.cache
        self.prefill = Prefill(shape)
        self.wrapper: Any = None

    def plan(self, batch: AttentionBatch, window: int) -> None:
        spans = make_chunk_spans(batch, self.cache.page_size, window, WHOLE)
        self.wrapper = self.prefill.plan(batch, spans, window)

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:
        pages = self.cache.keys[layer], self.cache.values[layer]
        scales = self.shape.list_scales(layer)
        if sinks is None:
            self.wrapper.run(query, pages, out=output, **scales)
        else:
            _, lse = self.wrapper.run(query, pages, out=output, return_lse=True, **scales)
            add_sinks(output, lse, sinks)


@dataclass(slots=True, frozen=True)
class _WrapperPlan:
    """own: every row over its own keys. prefix: `grouped` rows over their groups' keys; None without groups."""

    own: Any
    prefix: Any
    grouped: slice | Tensor


class FlashInferDecode:
    """`DecodePart` that attends row by row in a group whose prefix is not in every row's window."""

    def __init__(self, shape: WrapperShape) -> None:
        from flashinfer import merge_state_in_place

        self.shape = shape
        self.cache = shape.cache
        self.merge = merge_state_in_place
        self.prefill = Prefill(shape)
        self.ring = WrapperRing(self._make, max(shape.max_seqs, LEAST_ROWS), shape.workspace.device)
        self.planned = _WrapperPlan(None, None, slice(0))

    def plan(self, batch: AttentionBatch, groups: tuple[PrefixGroup, ...], window: int) -> None:
        groups, skip = skip_pages(batch, groups, window)
        page_size = self.cache.page_size
        wrapper, inputs = self.ring.take()
        own = make_decode_spans(batch, skip, np.arange(batch.num_decode), page_size, window)
        self.shape.plan(wrapper, put_paged_keys(inputs, batch, own, page_size), window)
        grouped = select_rows(np.flatnonzero(skip), lambda rows: inputs.upload(rows)[0])
        inputs.seal()
        prefix = self.prefill.plan(batch, make_prefix_spans(groups, page_size, WHOLE), 0) if groups else None
        self.planned = _WrapperPlan(wrapper, prefix, grouped)

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:
        plan, pages = self.planned, (self.cache.keys[layer], self.cache.values[layer])
        scales = self.shape.list_scales(layer)
        if plan.prefix is None and sinks is None:
            plan.own.run(query, pages, out=output, **scales)
            return
        _, lse = plan.own.run(query, pages, out=output, return_lse=True, **scales)  # base 2, as in all of FlashInfer
        if sinks is not None:
            add_sinks(output, lse, sinks)
        if plan.prefix is None:
            return
        shared = query[plan.grouped]
        prefix, prefix_lse = plan.prefix.run(shared, pages, out=torch.empty_like(shared), return_lse=True, **scales)
        own = output[plan.grouped]  # a view, if the rows are a run
        self.merge(own, lse[plan.grouped], prefix, prefix_lse)
        if isinstance(plan.grouped, Tensor):
            output.index_copy_(0, plan.grouped.long(), own)

    def _make(self) -> Any:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        shape = self.shape
        return BatchDecodeWithPagedKVCacheWrapper(shape.workspace, "HND", use_tensor_cores=shape.uses_tensor_cores)


def add_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Adds a logit of each head to the softmax of output [t, heads, dim] and lse [t, heads], of base 2, in place."""
    whole = torch.logaddexp2(lse, sinks.float() / math.log(2))
    output.mul_(torch.exp2(lse - whole)[..., None])
    lse.copy_(whole)


def skip_pages(
    batch: AttentionBatch, groups: tuple[PrefixGroup, ...], window: int
) -> tuple[tuple[PrefixGroup, ...], Int64]:
    """Returns the groups whose whole prefix is in every row's window, and the pages that decoding rows skip, [rows]."""
    seen, skip = [], np.zeros(batch.num_decode, dtype=np.int64)
    for group in groups:
        rows = slice(group.first_row, group.first_row + group.num_rows)
        if not 0 < window < batch.context_lengths[rows].max():
            seen.append(group)
            skip[rows] = group.num_pages
    return tuple(seen), skip


def select_rows(rows: Int64, upload: Callable[[Int64], Tensor]) -> slice | Tensor:
    """Makes an index of rows, ascending: a slice if they are a run, or none, else what `upload` makes of them."""
    if not len(rows):
        return slice(0)
    is_run = len(rows) == rows[-1] - rows[0] + 1
    return slice(int(rows[0]), int(rows[-1]) + 1) if is_run else upload(rows)
