"""Decoding rows of any lengths equal the definition, and so do replays of a graph as lengths change."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.cases.attention import E4M3_SCALED, AttentionCase, make_case
from toka_async.attention.kv_cache import CacheFormat
from toka_async.attention.row_decode import RowDecode
from toka_async.kernels.decode import DecodeConfig, decode_attention
from toka_async.kernels.decode_work import divide_alike
from toka_async.kernels.occupancy import programs_per_sm, read_limits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
BOUND = 1e-2


def spread(num_rows: int, mean: int, seed: int = 0) -> list[int]:
    return [1 + int(keys) for keys in np.random.default_rng(seed).exponential(mean, num_rows)]


PROFILES = {
    "a long row beside short ones": [40_000, *[300] * 63],
    "conversations": spread(200, 1300),
    "many": spread(800, 200),
    "few": [9000, 20, 1300],
    "even": [1200] * 64,
    "one": [30_000],
}


def case_of(contexts: list[int], dim: int, stored: CacheFormat | None = None) -> AttentionCase:
    return make_case(0, 16, 8, 4, dim, contexts=contexts, dtype=torch.bfloat16, device=CUDA, stored=stored)


def error(output: torch.Tensor, expected: torch.Tensor) -> float:
    assert output.isfinite().all()
    return float((output.float() - expected).norm() / expected.norm())


@torch.inference_mode()
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [0, 500])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("stored", [None, E4M3_SCALED], ids=["plain", "e4m3"])
def test_equals_the_definition(profile: str, dim: int, window: int, stored: CacheFormat | None) -> None:
    case = case_of(PROFILES[profile], dim, stored)
    rows = RowDecode(case.cache, case.num_heads, case.scale)
    lengths = case.batch.context_lengths
    rows.plan(case.batch, np.minimum(lengths, window) if window else lengths, None, window)
    output = torch.full_like(case.query, torch.nan)
    rows.run(0, case.query, output)
    assert error(output, case.expected(window)) < BOUND


@torch.inference_mode()
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_graph_serves_rows_of_any_lengths(profile: str, dim: int) -> None:
    case = case_of(PROFILES[profile], dim)
    rows = RowDecode(case.cache, case.num_heads, case.scale)
    static = replace(case.batch, slots=case.batch.slots.clone(), contexts=torch.ones_like(case.batch.contexts))
    output = torch.full_like(case.query, torch.nan)

    def step() -> None:
        rows.plan_graph(static, None, 0)
        for _ in range(2):  # layers share what is planned, and memory
            rows.run(0, case.query, output)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for order in (np.arange(len(lengths := PROFILES[profile])), np.random.default_rng(1).permutation(len(lengths))):
        static.slots.copy_(case.batch.slots[torch.from_numpy(order).to(CUDA)])
        static.contexts.copy_(case.batch.contexts[torch.from_numpy(order).to(CUDA)])
        output.fill_(torch.nan)
        graph.replay()
        now = replace(static, context_lengths=case.batch.context_lengths[order])
        assert error(output, replace(case, batch=now).expected()) < BOUND


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("num_warps", [1, 2, 4])
def test_programs_of_a_multiprocessor_are_those_of_the_driver(dim: int, num_warps: int) -> None:
    case = case_of([5], dim)
    work, config = divide_alike(1, 1, 1, CUDA), DecodeConfig(32, num_warps, 2)
    rows = RowDecode(case.cache, case.num_heads, case.scale)
    batch, output = case.batch, torch.empty_like(case.query)
    rows.plan_graph(batch, None, 0)
    assert rows.step is not None
    cache = (case.cache.keys[0], case.cache.values[0], batch.page_table, batch.slots, batch.contexts)
    kernel = decode_attention(case.query, *cache, output, 1.0, config, work, rows.step.partial)
    found, shared = ctypes.c_int(), kernel.metadata.shared
    status = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(found), ctypes.c_void_p(kernel.function), 32 * num_warps, ctypes.c_size_t(shared)
    )
    assert status == 0
    assert programs_per_sm(shared, kernel.n_regs, num_warps, read_limits(CUDA)) == found.value
