"""Mixtures of experts at real shapes: every plan against float64, in graphs that other routes replay, without waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.experts import take_experts
from toka_async.kernels.experts.mixture import STRAIGHT, ExpertKernels, ExpertPlan, choose_plan
from toka_async.kernels.experts.routing import route
from toka_async.kernels.experts.weights import ExpertOfAll, ExpertWeights
from toka_async.model.matrices.ops import TorchOps
from toka_async.tuning.experts import GROUPED_TILES, has_library

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = torch.device("cuda")
# experts, top_k, hidden, inner: Qwen3-30B-A3B, Mixtral 8x7B's on four ranks, odd ones
SHAPES = [(128, 8, 2048, 768), (8, 2, 4096, 3584), (60, 4, 1032, 104)]


def make_experts(
    num_experts: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16
) -> ExpertWeights:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        scale: float = shape[-1] ** -0.5
        return torch.randn(shape, device=DEVICE, dtype=dtype, generator=generator) * scale

    return ExpertWeights(
        gate_up=draw(num_experts, 2 * inner, hidden),
        down=draw(num_experts, hidden, inner),
        first=0,
        top_k=top_k,
        renormalizes=True,
        activation="silu",
        loads=torch.zeros(num_experts, dtype=torch.int64, device=DEVICE),
    )


def draw_tokens(num_tokens: int, experts: ExpertWeights, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Hidden states, and logits by which some experts are chosen far more often than others, and one never."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    num_experts, hidden, _ = experts.down.shape
    dtype = experts.down.dtype
    x = torch.randn(num_tokens, hidden, device=DEVICE, dtype=dtype, generator=generator)
    bias = torch.linspace(-1, 1, num_experts, device=DEVICE)
    bias[num_experts // 2] = -50
    logits = torch.randn(num_tokens, num_experts, device=DEVICE, generator=generator) + bias
    return x, logits.to(dtype)


def mix_exactly(x: Tensor, logits: Tensor, experts: ExpertWeights) -> Tensor:
    wide = replace(experts, gate_up=experts.gate_up.double(), down=experts.down.double(), loads=None)
    return TorchOps().mix_experts(x.double(), logits.double(), wide, None)


def check(output: Tensor, exact: Tensor) -> None:
    assert (output.double() - exact).norm() / exact.norm() < 6e-3


def list_plans(num_tokens: int, experts: ExpertWeights) -> list[ExpertPlan]:
    plans = [ExpertPlan(tile, tile) for tile in GROUPED_TILES]
    if has_library(experts.down):
        plans.append(ExpertPlan(GROUPED_TILES[0], None))
    return [*plans, STRAIGHT] if num_tokens <= 64 else plans


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 300, 3000])
def test_every_plan(shape: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype) -> None:
    experts = make_experts(*shape, dtype=dtype)
    x, logits = draw_tokens(num_tokens, experts)
    exact = mix_exactly(x, logits, experts)
    for plan in list_plans(num_tokens, experts):
        kernels = ExpertKernels()
        kernels.use(experts, [num_tokens], [plan])
        check(kernels.mix(x, logits, experts, None), exact)
        residual = torch.ones_like(x)
        check(kernels.mix(x, logits, experts, residual), exact + 1)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 3000])
@pytest.mark.parametrize("captured", [False, True])
def test_an_expert_of_all_tokens(num_tokens: int, captured: bool) -> None:
    experts = make_experts(256, 8, 2048, 512)
    given = [draw_tokens(num_tokens, experts, seed) for seed in range(8)]
    weight, gate = (torch.randn(size, 2048, device=DEVICE, dtype=torch.bfloat16) * 2048**-0.5 for size in (2048, 1))
    kernels, (x, logits) = ExpertKernels(), (tensor.clone() for tensor in given[0])

    def mix() -> Tensor:
        return kernels.mix(x, logits, experts, None, ExpertOfAll(lambda: F.linear(x, weight), gate))

    output, graph = mix(), torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            output = mix()
    results = []
    for tensors in given:
        x.copy_(tensors[0])
        logits.copy_(tensors[1])
        if captured:
            graph.replay()
        else:
            output = mix()
        results.append(output.clone())
    for result, (tokens, choices) in zip(results, given, strict=True):
        of_all = F.linear(tokens, weight).double() * torch.sigmoid(tokens.double() @ gate.double().T)
        check(result, mix_exactly(tokens, choices, experts) + of_all)


def test_float32() -> None:
    experts = make_experts(8, 2, 512, 320, dtype=torch.float32)
    for num_tokens in (1, 200):
        x, logits = draw_tokens(num_tokens, experts)
        exact = mix_exactly(x, logits, experts)
        output = ExpertKernels().mix(x, logits, experts, None)
        torch.testing.assert_close(output.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [4, 400])
def test_ranks_add_up(num_tokens: int) -> None:
    experts = make_experts(*SHAPES[0])
    x, logits = draw_tokens(num_tokens, experts)
    parts = [ExpertKernels().mix(x, logits, take_experts(experts, first, 32), None) for first in range(0, 128, 32)]
    check(torch.stack(parts).double().sum(0), mix_exactly(x, logits, experts))


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 64, 1000])
def test_graphs_take_any_routes(num_tokens: int) -> None:
    """A capture fails if the host waits. Padding is not counted."""
    experts = replace(make_experts(*SHAPES[0]), counted=torch.zeros(1, dtype=torch.int32, device=DEVICE))
    assert experts.loads is not None
    assert experts.counted is not None
    kernels, (x, logits) = ExpertKernels(), draw_tokens(num_tokens, experts)
    plans = {choose_plan(num_tokens * experts.top_k, 128, x.dtype)}
    if has_library(experts.down) and num_tokens > 8:
        plans.add(ExpertPlan(GROUPED_TILES[0], None))
    for plan in plans:
        kernels.use(experts, [num_tokens], [plan])
        kernels.mix(x, logits, experts, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = kernels.mix(x, logits, experts, None)
        for seed in (2, 3):
            for memory, values in zip((x, logits), draw_tokens(num_tokens, experts, seed), strict=True):
                memory.copy_(values)
            experts.counted.fill_(num_tokens - 1)
            experts.loads.zero_()
            graph.replay()
            check(output, mix_exactly(x, logits, experts))
            ids = route(logits[:-1], experts.top_k, True).ids
            assert torch.equal(experts.loads, torch.bincount(ids.flatten(), minlength=128))


def test_a_token_has_the_same_bits_alone() -> None:
    experts = make_experts(*SHAPES[0])
    x, logits = draw_tokens(500, experts)
    kernels = ExpertKernels(invariant=True)
    together = kernels.mix(x, logits, experts, None)
    for part in (slice(0, 1), slice(17, 40), slice(499, 500)):
        assert torch.equal(kernels.mix(x[part], logits[part].contiguous(), experts, None), together[part])


def test_any_step_gives_the_same_bits_again() -> None:
    experts = make_experts(*SHAPES[1])
    x, logits = draw_tokens(700, experts)
    first = ExpertKernels().mix(x, logits, experts, None)
    for _ in range(5):
        assert torch.equal(ExpertKernels().mix(x, logits, experts, None), first)
