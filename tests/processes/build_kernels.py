"""Builds our kernels for GPUs that need not be here: those that a start of some model would build, by the same code.

`python -m tests.processes.build_kernels`, without Triton's interpreter, reads a JSON list of [architecture, what,
arguments] and prints for each a line: what could be built, or the error that ended it, and the kernels that it loaded.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import triton

from tests.fakes.offline_gpus import OfflineGpu
from toka_async.attention import build
from toka_async.attention.base import AttentionBatch, ChunkStates
from toka_async.attention.choice import AutoChunks
from toka_async.attention.invariant.backend import InvariantChunks
from toka_async.attention.kv_cache import CacheFormat, KVCache
from toka_async.attention.paged import PagedAttention
from toka_async.attention.states.cache import StateCache
from toka_async.attention.states.triton_ops import TritonStateOps
from toka_async.attention.triton import TritonChunks
from toka_async.attention.try_out import TrialShape, make_batch
from toka_async.kernels import few_rows, prefill
from toka_async.kernels.append import append
from toka_async.kernels.built import explain_unbuilt
from toka_async.kernels.delta import chunks, convolution, step
from toka_async.kernels.delta.layer import DeltaShape, DeltaWeights
from toka_async.kernels.experts import few_tokens, gate, routing
from toka_async.kernels.experts.grouped import BLOCK, GroupedProducts
from toka_async.kernels.experts.mixture import ExpertKernels, ExpertPlan
from toka_async.kernels.experts.weights import ExpertOfAll, ExpertWeights
from toka_async.kernels.fp8.quantize import FP8, quantize, quantize_gate, quantize_norm
from toka_async.kernels.fp8.scaled import TILES, multiply_scaled
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import GatedProducts, RowScales
from toka_async.kernels.prefill import list_prefill_configs
from toka_async.kernels.sampling.edit import LIST_WIDTH, EditKernels, EditTable, RowTokens
from toka_async.kernels.sampling.kernels import RowTable, SamplingKernels
from toka_async.kernels.scaled_weight import ScaledWeight
from toka_async.runner.kernel_sampler import try_sampling
from toka_async.tuning import few_rows as few_rows_tuning
from toka_async.tuning.experts import GROUPED_TILES, SCALED_GROUPED_TILES
from toka_async.tuning.fp8 import FEW_ROWS_TILES
from toka_async.tuning.fp8 import GATED_TILES as SCALED_GATED_TILES
from toka_async.tuning.gated_tiles import TILES as GATED_TILES
from toka_async.tuning.gated_tiles import GatedTileChoice

CPU = torch.device("cpu")


def build_attention(
    dtype: str,
    dim: int,
    group: int,
    page_size: int = 16,
    windows: tuple[int, ...] = (0,),
    stored: str = "",
    has_sinks: bool = False,
    soft_cap: float = 0.0,
) -> str:
    """Returns which of the possible tiles were chosen."""
    arch = triton.runtime.driver.active.get_current_target().arch
    prefill.is_hopper = lambda _: arch == 90  # type: ignore[assignment]
    cache_format = CacheFormat(getattr(torch, stored or dtype))
    cache = KVCache(1, 2, 2, page_size, dim, getattr(torch, dtype), CPU, stored=cache_format)
    heads, rotation = torch.zeros(3, 2 * group + 4, dim, dtype=cache.dtype), torch.zeros(3, 1, dim, dtype=cache.dtype)
    append(heads, (rotation, rotation), cache.keys[0], cache.values[0], torch.zeros(3, dtype=torch.int64))
    built = build.build_attention("triton", cache, 2 * group, windows, 512, 512, has_sinks=has_sinks, soft_cap=soft_cap)
    attention = built.backend
    assert isinstance(attention, PagedAttention)
    chunks = attention.chunks[0]
    assert isinstance(chunks, AutoChunks)
    part = chunks.parts["triton"]
    assert isinstance(part, TritonChunks)
    tiles = "for Hopper" if part.config.registers else list_prefill_configs(dim, group, cache.dtype).index(part.config)
    return f"tiles {tiles}" + (" and wide pages" if part.wide is not None else "")


def build_invariant(dtype: str, dim: int, group: int, soft_cap: float = 0.0) -> str:
    """Builds attention that gives a token the same bits in every batch, which has one tile."""
    cache = KVCache(1, 2, 1, 16, dim, getattr(torch, dtype), CPU)
    part = InvariantChunks(cache, group, soft_cap=soft_cap)
    part.plan(make_batch(cache, TrialShape(((1, 1),), 0)), 0)
    query = cache.make_zero_queries(1, group)
    part.run(0, query, query)
    return "all"


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
    ops.apply_gates(x, x)
    return "all"


def build_gated(dtype: str, hidden: int, inner: int) -> str:
    """Returns how many tiles fit; without any, steps compute the product and the gate separately."""
    weight = torch.zeros(2 * inner, hidden, dtype=getattr(torch, dtype))
    choice = GatedTileChoice(GatedProducts(8), [weight], "silu", [128], lambda x, _: x)
    return f"{sum(choice.admits([tile]) for tile in GATED_TILES)} tiles"


def build_experts(
    dtype: str,
    hidden: int,
    inner: int,
    num_experts: int,
    top_k: int,
    by_block: bool | None = None,
    is_clamped: bool = False,
) -> str:
    """Returns how many tiles fit, for gate and up and for down, copied by the chip where it can.

    by_block: weights are in E4M3, with scales of blocks or of rows; None: they are not. is_clamped: as of gpt-oss.
    """
    arch = triton.runtime.driver.active.get_current_target().arch
    for module in (routing, few_tokens, gate):
        module.can_follow = lambda _: arch >= 90  # type: ignore[attr-defined]
    kind = getattr(torch, dtype)
    experts = ExpertWeights(
        gate_up=torch.empty(num_experts, 2 * inner, hidden, dtype=kind),
        down=torch.empty(num_experts, hidden, inner, dtype=kind),
        first=0,
        top_k=top_k,
        renormalizes=True,
        activation="clamped_swiglu" if is_clamped else "silu",
        loads=torch.zeros(num_experts, dtype=torch.int64),
        counted=torch.zeros(1, dtype=torch.int32),
        gate_up_bias=torch.zeros(num_experts, 2 * inner, dtype=kind) if is_clamped else None,
        down_bias=torch.zeros(num_experts, hidden, dtype=kind) if is_clamped else None,
    )
    tiles = GROUPED_TILES
    if by_block is not None:
        tiles = tuple(tile for tile in SCALED_GROUPED_TILES if not by_block or tile.width <= BLOCK)
        shapes = [experts.gate_up.shape, experts.down.shape]
        scales = [torch.zeros(e, n // 128, k // 128) if by_block else torch.zeros(e, n) for e, n, k in shapes]
        values = [torch.empty(shape, dtype=torch.float8_e4m3fn) for shape in shapes]
        experts = replace(experts, gate_up=values[0], down=values[1], gate_up_scales=scales[0], down_scales=scales[1])
    x, logits = torch.zeros(num_experts, hidden, dtype=kind), torch.zeros(num_experts, num_experts, dtype=kind)
    kernels = ExpertKernels(GroupedProducts(copies=arch >= 90))
    for num_tokens in (1, num_experts):  # straight, and grouped
        for of_all in (None, ExpertOfAll(lambda: x, x[:1])):
            kernels.mix(x[:num_tokens], logits[:num_tokens], experts, x[:num_tokens], of_all)
    routes = routing.route(logits[:3], top_k, True)
    plans = [partial(kernels.compute, ExpertPlan(tile, tile), x[:3], routes, experts, x[:3], True) for tile in tiles]
    return f"{sum(not explain_unbuilt(plan) for plan in plans)} tiles"


def build_few_rows(dtype: str, hidden: int, inner: int) -> str:
    """Returns how many tiles fit, with a norm and a gate, starting early where the GPU can."""
    arch = triton.runtime.driver.active.get_current_target().arch
    few_rows.can_follow = lambda _: arch >= 90  # type: ignore[assignment, attr-defined]
    weight = torch.zeros(2 * inner, hidden, dtype=getattr(torch, dtype))
    choice = few_rows_tuning.FewRowsChoice(
        few_rows.FewRowsProducts(1 << 24, 800), [weight], "silu", [1], lambda *_: None, norm=(weight[0], 1e-6)
    )
    return f"{sum(choice.admits([tile]) for tile in few_rows_tuning.TILES)} tiles"


def build_quantized(dtype: str, hidden: int, inner: int, by_block: bool) -> str:
    """Builds what quantizes activations, and the products with quantized weights by our kernels, of all tiles."""
    arch, kind = triton.runtime.driver.active.get_current_target().arch, getattr(torch, dtype)
    few_rows.can_follow = lambda _: arch >= 90  # type: ignore[assignment, attr-defined]
    x, gate_up = torch.zeros(3, hidden, dtype=kind), torch.zeros(3, 2 * inner, dtype=kind)
    rows, _ = quantize_norm(x, x, x[0], 1e-6, by_block)
    quantize_norm(x, None, x[0], 1e-6, by_block)
    quantize(x, by_block)
    quantize_gate(gate_up, "silu", by_block)
    scales = torch.zeros((2 * inner // 128, hidden // 128) if by_block else (2 * inner,))
    weight = ScaledWeight(torch.zeros(2 * inner, hidden, dtype=FP8), scales)
    for tile in itertools.chain(*TILES.values()):
        multiply_scaled(rows, weight, kind, residual=gate_up, tile=tile)
    output, few = gate_up[:, :inner].contiguous(), few_rows.FewRowsProducts(1 << 24, 800)
    for few_tile in FEW_ROWS_TILES:
        if few.can_run("silu", few_tile, x[:1], weight):
            few.run("silu", few_tile, x[:1], weight, output, norm=(x[0], 1e-6))
    if arch in (90, 100) and kind != torch.float32:
        for gated_tile in SCALED_GATED_TILES[by_block]:
            GatedProducts(8).run("silu", gated_tile, rows[0], weight, output, scales=RowScales(rows[1], kind))
    return "all"


def build_sampling(dtype: str, vocab: int) -> str:
    kind = getattr(torch, dtype)
    try_sampling(vocab, kind, CPU)
    floats, integers = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    seen, ids = torch.zeros(2, -(-vocab // 32), dtype=torch.int32), torch.zeros(2, LIST_WIDTH, dtype=torch.int32)
    rows = RowTable(floats, floats, floats, floats, integers, integers, integers, integers.long(), seen)
    wanted = EditTable(floats, floats, integers, integers, integers, integers, ids, ids.float())
    tokens = RowTokens(torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4, 16, dtype=torch.int32))
    drawing = SamplingKernels(vocab, 2, CPU)
    edits = EditKernels(drawing, 64, CPU)
    step = torch.zeros(2, vocab, dtype=kind), integers.long(), integers, rows, wanted, tokens
    for masks in (seen, None):
        edits.edit(*step, masks)
        drawing.draw_measured(*step[:4], masks)
        edits.restore(*step, (integers.long(), floats), masks)
    return "all"


def build_states(
    dtype: str, key_heads: int, value_heads: int, key_dim: int, value_dim: int, stored: str = "float32"
) -> str:
    """Builds what recurrent layers compute, in steps of rows that decode and chunks of prompts."""
    kind, shape = getattr(torch, dtype), DeltaShape(key_heads, value_heads, key_dim, value_dim, width=4)
    cache = StateCache(shape, 1, max_seqs=2, num_snapshots=1, dtype=kind, device=CPU, stored=getattr(torch, stored))
    ops, heads = TritonStateOps(cache), torch.zeros(value_heads)
    weights = DeltaWeights(
        torch.zeros(shape.num_channels, 4, dtype=kind), heads, heads, torch.zeros(value_dim, dtype=kind), 1e-6
    )
    inputs, z = torch.zeros(81, shape.num_channels, dtype=kind), torch.zeros(81, shape.num_values, dtype=kind)
    none, lengths = torch.zeros(1, dtype=torch.int32), np.asarray([1, 80], np.int32)
    states = ChunkStates(np.asarray([1], np.int32), ((0, 70, 0),))
    batch = AttentionBatch(
        1, lengths, lengths, none, torch.zeros(2, dtype=torch.int64), none[None], torch.zeros(81), states=states
    )
    arch = triton.runtime.driver.active.get_current_target().arch
    chunks.has_tensor_memory = lambda _: arch == 100  # type: ignore[assignment]
    chunks.has_large_memory = lambda _: arch == 90  # type: ignore[assignment]
    for module in (convolution, step):
        module.can_follow = lambda _: arch >= 90  # type: ignore[attr-defined]
    cells = torch.zeros(ops.count_cells(81, 1), dtype=torch.int32)
    for plan in (partial(ops.plan, batch), partial(ops.plan_mixed, batch, cells)):
        plan()
        ops.compute(0, inputs, z, torch.zeros(81, 2 * value_heads, dtype=kind), weights)
    return "all"


BUILDERS: dict[str, Callable[..., str]] = {
    "attention": build_attention,
    "invariant": build_invariant,
    "layer": build_layer,
    "gated": build_gated,
    "experts": build_experts,
    "few rows": build_few_rows,
    "quantized": build_quantized,
    "sampling": build_sampling,
    "states": build_states,
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
    build.resolve_backend = lambda backend, *_: backend
    for arch, what, arguments in json.load(sys.stdin):
        print(json.dumps(run(arch, what, arguments)), flush=True)
