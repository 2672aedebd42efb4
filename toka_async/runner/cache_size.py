"""How much of a GPU's memory is left for the KV cache, once weights and the largest step have theirs.

Knows the model's shape and the limits; what a step really needs is measured by the caller.
"""

from __future__ import annotations

import torch

from toka_async.attention.kv_cache import bytes_per_token
from toka_async.config import CacheConfig
from toka_async.model.spec import ModelError, ModelSpec
from toka_async.runner.limits import Limits
from toka_async.runner.memory import free_cuda_memory
from toka_async.runner.slab_sampler import SLAB_BYTES

_HISTORY_BYTES = 4  # per token: its id
# Beyond what a step allocates: graphs, libraries' workspaces, and what an allocator's blocks waste.
_SPARE_SHARE = 0.02
_SPARE_BYTES = 1 << 30


def page_bytes_of(spec: ModelSpec, cache: CacheConfig, dtype: torch.dtype) -> int:
    """Bytes of a page over all layers."""
    return cache.page_size * (bytes_per_token(spec, dtype) + _HISTORY_BYTES)


def pages_of_largest_step(limits: Limits, page_size: int) -> int:
    """Enough for a step of the most rows and tokens, and a token more of each."""
    return limits.max_seqs * 2 + -(-limits.max_tokens // page_size)


def memory_for_cache(device: torch.device, fraction: float, peak: int) -> int:
    """Bytes that the cache may take when weights and the largest step together take `peak` of torch's."""
    reserved = torch.cuda.memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return free_cuda_memory(device, fraction) + reserved - peak - int(_SPARE_SHARE * total) - _SPARE_BYTES


def check_largest_step(
    spec: ModelSpec, limits: Limits, dtype: torch.dtype, device: torch.device, fraction: float
) -> None:
    """Refuse limits whose largest step cannot fit, before it is tried.

    Raises ModelError, which names the setting that takes more, and a value that would fit.
    """
    free = free_cuda_memory(device, fraction) - 4 * SLAB_BYTES["cuda"]
    for_tokens = limits.max_tokens * token_bytes(spec, dtype)
    for_rows = limits.max_seqs * row_bytes(spec, limits, dtype)
    if for_tokens + for_rows <= free:
        return
    if for_rows > for_tokens:
        name, value, each, other = "schedule.max_seqs", limits.max_seqs, for_rows // limits.max_seqs, for_tokens
    else:
        name, value, each, other = "schedule.max_tokens", limits.max_tokens, for_tokens // limits.max_tokens, for_rows
    fits = max(1, min(value // 2, (free - other) // each))
    raise ModelError(
        f"{name}={value}: the largest step takes about {(for_tokens + for_rows) >> 20} MiB where {max(free, 0) >> 20} "
        f"MiB are free; use at most {fits}"
    )


def token_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Of a token in a step: a layer's widest moment (residual, norm, gate, up and their product) and its keys."""
    projections = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    a_token = 4 * spec.hidden_size + 3 * spec.intermediate_size + 2 * projections
    return a_token * dtype.itemsize + bytes_per_token(spec, dtype)


def row_bytes(spec: ModelSpec, limits: Limits, dtype: torch.dtype) -> int:
    """Of a row: its logits, its line in the page table at the smallest page, what sampling keeps of it."""
    return spec.vocab_size * dtype.itemsize + spec.vocab_size // 4 + 4 * limits.max_context // 16
