"""Builds a rank's runner from a model directory and configuration: device, weights, cache, attention, warm-up.

Knows how the parts fit together; knows no processes and no sockets.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from toka_async.attention.kv_cache import KVCache, bytes_per_token
from toka_async.attention.reference import ReferenceAttention
from toka_async.config import AttentionConfig, CacheConfig, ModelConfig, ScheduleConfig
from toka_async.messages import Ready
from toka_async.model.decoder import Decoder
from toka_async.model.spec import ModelError, ModelSpec
from toka_async.model.weights import build_decoder, load_weights, random_weights
from toka_async.runner.limits import DeviceKind, Limits, resolve_limits, resolve_num_pages
from toka_async.runner.memory import available_memory, free_cuda_memory
from toka_async.runner.runner import Runner
from toka_async.runner.sampler import SLAB_BYTES
from toka_async.runner.warmup import warm_up

_HISTORY_BYTES = 4  # per token: its id
_AUTO_CPU_SHARE = 0.25
_MOST_CPU_SHARE = 0.9
_SMALL_PARAMETERS = 10_000_000


def build_runner(
    model_dir: Path,
    spec: ModelSpec,
    model: ModelConfig,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    attention: AttentionConfig,
    progress: bool = True,
) -> Runner:
    """A runner that is ready for its first step. Raises ModelError, which names the field and the fix."""
    device = resolve_device(model)
    kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
    limits = resolve_limits(model, schedule, spec, kind)
    dtype = resolve_dtype(model, spec, device)
    decoder = build_decoder(spec, dtype, device)
    if model.load == "random":
        random_weights(decoder, seed=0)
    else:
        load_weights(decoder, model_dir, progress)
    if kind == "cpu":
        torch.set_num_threads(resolve_num_threads(attention, decoder))
    kv_cache = build_cache(spec, cache, limits, dtype, device)
    backend = ReferenceAttention(kv_cache, spec.num_heads, spec.windows)
    group_min_seqs, group_min_tokens = backend.smallest_group()
    ready = Ready(
        num_pages=kv_cache.num_pages,
        page_size=cache.page_size,
        max_seqs=limits.max_seqs,
        max_context=min(limits.max_context, kv_cache.num_pages * cache.page_size),
        vocab_size=spec.vocab_size,
        max_tokens=limits.max_tokens,
        group_min_seqs=group_min_seqs,
        group_min_tokens=group_min_tokens,
    )
    runner = Runner(decoder, kv_cache, backend, ready, device)
    warm_up(runner)
    return runner


def resolve_device(model: ModelConfig) -> torch.device:
    """`auto` is the first GPU where there is one."""
    if model.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if model.device == "cuda":
        raise ModelError("model.device=cuda: this machine has no CUDA device that torch can use; use cpu or auto")
    return torch.device("cpu")


def resolve_dtype(model: ModelConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, else the checkpoint's."""
    name = model.dtype
    if name == "auto":
        return torch.float32 if device.type == "cpu" else getattr(torch, spec.dtype)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_num_threads(attention: AttentionConfig, decoder: Decoder) -> int:
    """`auto` is one thread for small models and all cores for others.

    Measured on two cores, one thread and two: 2M parameters decode 64 rows in 11 ms and 20, and one row in 2.6 and 3.1;
    20M parameters decode one row in 19 ms and 10.
    """
    if attention.num_threads != "auto":
        return attention.num_threads
    small = sum(parameter.numel() for parameter in decoder.parameters()) < _SMALL_PARAMETERS
    return 1 if small else len(os.sched_getaffinity(0))


def build_cache(
    spec: ModelSpec, cache: CacheConfig, limits: Limits, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """The KV cache, as large as configured or as memory allows, once the weights are in memory."""
    page_bytes = cache.page_size * (bytes_per_token(spec, dtype) + _HISTORY_BYTES)
    if device.type == "cuda":
        most = free_cuda_memory(device, cache.memory_fraction) - activation_bytes(spec, limits, dtype)
        auto = most
    else:
        available = available_memory()
        auto, most = int(_AUTO_CPU_SHARE * available), int(_MOST_CPU_SHARE * available)
    num_pages = resolve_num_pages(cache, limits, page_bytes, auto, most)
    return KVCache(spec.num_layers, num_pages, spec.num_kv_heads, cache.page_size, spec.head_dim, dtype, device)


def activation_bytes(spec: ModelSpec, limits: Limits, dtype: torch.dtype) -> int:
    """Of the largest step: a layer's widest moment (residual, norm, gate, up and their product) and sampling."""
    projections = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    a_token = 4 * spec.hidden_size + 3 * spec.intermediate_size + 2 * projections
    return limits.max_tokens * a_token * dtype.itemsize + 4 * SLAB_BYTES["cuda"]
