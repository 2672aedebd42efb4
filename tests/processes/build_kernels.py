"""Builds our kernels for GPUs that need not be here: those that a start of some model would build, by the same code.

`python -m tests.processes.build_kernels`, without Triton's interpreter, reads a JSON list of [architecture, what,
arguments] and prints for each a line: what could be built, or the error that ended it, and the kernels that it loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import triton

from tests.fakes.offline_gpus import OfflineGpu
from toka_async.attention import build
from toka_async.attention.choice import AutoChunks
from toka_async.attention.kv_cache import CacheFormat, KVCache
from toka_async.attention.paged import PagedAttention
from toka_async.attention.triton import TritonChunks
from toka_async.kernels import few_rows, prefill
from toka_async.kernels.append import append
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import GatedProducts
from toka_async.kernels.prefill import list_prefill_configs
from toka_async.kernels.sampling.edit import LIST_WIDTH, EditKernels, EditTable, RowTokens
from toka_async.kernels.sampling.kernels import RowTable, SamplingKernels
from toka_async.runner.kernel_sampler import try_sampling
from toka_async.tuning import few_rows as few_rows_tuning
from toka_async.tuning.gated_tiles import TILES, GatedTileChoice

CPU = torch.device("cpu")


def build_attention(
    dtype: str, dim: int, group: int, page_size: int = 16, windows: tuple[int, ...] = (0,), stored: str = ""
) -> str:
    """Returns which of the possible tiles were chosen."""
    arch = triton.runtime.driver.active.get_current_target().arch
    prefill.is_hopper = lambda _: arch == 90  # type: ignore[assignment]
    cache_format = CacheFormat(getattr(torch, stored or dtype))
    cache = KVCache(1, 2, 2, page_size, dim, getattr(torch, dtype), CPU, stored=cache_format)
    heads, rotation = torch.zeros(3, 2 * group + 4, dim, dtype=cache.dtype), torch.zeros(3, 1, dim, dtype=cache.dtype)
    append(heads, (rotation, rotation), cache.keys[0], cache.values[0], torch.zeros(3, dtype=torch.int64))
    attention = build.build_attention("triton", cache, 2 * group, windows, max_seqs=512, max_tokens=512).backend
    assert isinstance(attention, PagedAttention)
    chunks = attention.chunks[0]
    assert isinstance(chunks, AutoChunks)
    part = chunks.parts["triton"]
    assert isinstance(part, TritonChunks)
    if part.config.registers:
        return "tiles for Hopper"
    return f"tiles {list_prefill_configs(dim, group, cache.dtype).index(part.config)}"


def build_layer(dtype: str, dim: int, hidden: int) -> str:
    """Builds what is between a layer's matrices and its attention."""
    kind = getattr(torch, dtype)
    heads, rotation = torch.zeros(3, 12, dim, dtype=kind), torch.zeros(3, 1, dim, dtype=kind)
    cache = torch.zeros(5, 2, 16, dim, dtype=kind)
    for norm in (None, torch.zeros(10, dim, dtype=kind)):
        append(heads, (rotation, rotation), cache, cache, torch.zeros(3, dtype=torch.int64), norm, 1e-6)
    x, ops = torch.zeros(3, hidden, dtype=kind), FusedOps()
    for residual in (None, x):
        ops.add_norm(x, residual, x[0], 1e-6)
    ops.gate(x, "silu")
    return "all"


def build_gated(dtype: str, hidden: int, inner: int) -> str:
    """Returns how many tiles fit; without any, steps compute the product and the gate separately."""
    weight = torch.zeros(2 * inner, hidden, dtype=getattr(torch, dtype))
    choice = GatedTileChoice(GatedProducts(8), [weight], "silu", [128], lambda x, _: x)
    return f"{sum(choice.admits([tile]) for tile in TILES)} tiles"


def build_few_rows(dtype: str, hidden: int, inner: int) -> str:
    """Returns how many tiles fit, with a norm and a gate, starting early where the GPU can."""
    arch = triton.runtime.driver.active.get_current_target().arch
    few_rows.can_follow = lambda _: arch >= 90  # type: ignore[assignment, attr-defined]
    weight = torch.zeros(2 * inner, hidden, dtype=getattr(torch, dtype))
    choice = few_rows_tuning.FewRowsChoice(
        few_rows.FewRowsProducts(1 << 24, 800), [weight], "silu", [1], lambda *_: None, norm=(weight[0], 1e-6)
    )
    return f"{sum(choice.admits([tile]) for tile in few_rows_tuning.TILES)} tiles"


def build_sampling(dtype: str, vocab: int) -> str:
    kind = getattr(torch, dtype)
    try_sampling(vocab, kind, CPU)
    floats, integers = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    seen, ids = torch.zeros(2, -(-vocab // 32), dtype=torch.int32), torch.zeros(2, LIST_WIDTH, dtype=torch.int32)
    rows = RowTable(floats, floats, floats, floats, integers, integers, integers, integers.long(), seen)
    wanted = EditTable(floats, floats, integers, integers, integers, integers, ids, ids.float())
    tokens = RowTokens(torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4, 16, dtype=torch.int32))
    edits = EditKernels(SamplingKernels(vocab, 2, CPU), 64, CPU)
    step = torch.zeros(2, vocab, dtype=kind), integers.long(), integers, rows, wanted, tokens
    edits.edit(*step)
    edits.restore(*step, (integers.long(), floats))
    return "all"


BUILDERS: dict[str, Callable[..., str]] = {
    "attention": build_attention,
    "layer": build_layer,
    "gated": build_gated,
    "few rows": build_few_rows,
    "sampling": build_sampling,
}


def run(arch: int, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
    gpu = OfflineGpu(arch)
    gpu.install()
    try:
        built = BUILDERS[what](**arguments)
    except Exception as error:
        built = f"{type(error).__name__}: {error}"
    return {"built": built, "kernels": [asdict(kernel) for kernel in gpu.loaded]}


if __name__ == "__main__":
    build.resolve_backend = lambda backend, _: backend  # type: ignore[assignment]
    for arch, what, arguments in json.load(sys.stdin):
        print(json.dumps(run(arch, what, arguments)), flush=True)
