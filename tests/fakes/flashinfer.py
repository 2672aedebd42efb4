"""FlashInfer's wrappers in plain torch: what they compute, and the arguments that they take, without a GPU.

As the real ones, a wrapper keeps what it was planned with, lse is in base 2, and `out` and `lse` are written in place.
"""

from __future__ import annotations

import importlib.machinery
import math
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor


class PagedWrapper:
    """What prefill and decode have in common."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "HND")
        self.rows: list[tuple[slice, Tensor]] = []  # queries; where the keys are, [keys, 2] of page and offset
        self.causal = False
        self.scale = 0.0
        self.window_left = -1
        self.num_plans = 0

    def set_plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        page_size: int,
        causal: bool,
        sm_scale: float,
        window_left: int,
    ) -> None:
        assert {x.dtype for x in (qo_indptr, kv_indptr, indices, last_page_len)} == {torch.int32}
        assert len(qo_indptr) == len(kv_indptr) == len(last_page_len) + 1
        assert len(indices) == kv_indptr[-1]
        self.rows = []
        for row, last in enumerate(last_page_len.tolist()):
            pages = indices[kv_indptr[row] : kv_indptr[row + 1]].repeat_interleave(page_size)
            offsets = torch.arange(len(pages)) % page_size
            places = torch.stack([pages, offsets], dim=1)[: len(pages) - page_size + last]
            self.rows.append((slice(int(qo_indptr[row]), int(qo_indptr[row + 1])), places.long()))
        self.causal, self.scale, self.window_left = causal, sm_scale, window_left
        self.num_plans += 1

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        assert out.is_contiguous()
        assert self.rows[-1][0].stop == len(q)
        lse = torch.empty(q.shape[:2]) if lse is None else lse
        group_size = q.shape[1] // paged_kv_cache[0].shape[1]
        for queries, places in self.rows:
            keys, values = (
                cache[places[:, 0], :, places[:, 1]].float().repeat_interleave(group_size, dim=1)
                for cache in paged_kv_cache
            )
            scores = torch.einsum("qhd,lhd->qhl", q[queries].float(), keys) * self.scale * (k_scale or 1)
            position = torch.arange(queries.stop - queries.start)[:, None] + len(keys) - (queries.stop - queries.start)
            key = torch.arange(len(keys))
            hidden = key > position if self.causal else torch.zeros(len(position), len(keys), dtype=torch.bool)
            if self.window_left >= 0:
                hidden = hidden | (key < position - self.window_left)
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
            out[queries] = torch.einsum("qhl,lhd->qhd", scores.softmax(-1), values).to(out.dtype)
            lse[queries] = scores.logsumexp(-1) / math.log(2)
        if v_scale is not None:
            out *= v_scale
        return (out, lse) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert backend in ("fa2", "fa3")
        self.backend = backend
        self.schedule_size = 8 << 20

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        self.schedule_size = len(int_workspace_buffer)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        max_token_per_sequence: int,
    ) -> None:
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim_qk
        assert self.backend == "fa2" or kv_data_type == q_data_type
        assert max_token_per_sequence == (qo_indptr[1:] - qo_indptr[:-1]).max()
        assert kv_data_type in (q_data_type, torch.float8_e4m3fn)
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self.set_plan(qo_indptr, *pages, causal, sm_scale, window_left)


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim
        assert kv_data_type in (q_data_type, torch.float8_e4m3fn)
        queries = torch.arange(len(indptr), dtype=torch.int32)
        self.set_plan(queries, indptr, indices, last_page_len, page_size, False, sm_scale, window_left)


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
    merged = torch.logaddexp2(s, s_other)
    result = v.float() * torch.exp2(s - merged)[..., None] + v_other.float() * torch.exp2(s_other - merged)[..., None]
    v.copy_(result.to(v.dtype))
    s.copy_(merged)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import flashinfer` gives this one, for the test."""
    module = ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    for thing in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper, merge_state_in_place):
        setattr(module, thing.__name__, thing)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
