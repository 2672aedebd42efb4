from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.experts import draw, make_experts, mix_exactly, take_experts
from toka_async.kernels.experts import mixture
from toka_async.kernels.experts.grouped import GroupedProducts, GroupedTile
from toka_async.kernels.experts.mixture import STRAIGHT, TILES, ExpertKernels, ExpertPlan, choose_plan
from toka_async.kernels.experts.weights import ExpertOfAll
from toka_async.model.matrices.ops import TorchOps
from toka_async.model.matrices.scaling import quantize

BF16 = torch.bfloat16
SMALL = GroupedTile(rows=16, width=32, depth=16, num_stages=2, num_warps=4)
GROUPED = ExpertPlan(SMALL, SMALL)
TOLERANCE = {torch.float32: 1e-5, BF16: 3e-2}


def make_kernels(copies: bool = False, invariant: bool = False) -> ExpertKernels:
    return ExpertKernels(GroupedProducts(copies), invariant)


@pytest.mark.parametrize("plan", [STRAIGHT, GROUPED], ids=["straight", "grouped"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden", "inner", "renormalizes", "is_clamped"),
    [
        (1, 8, 2, 32, 24, True, False),
        (2, 60, 4, 24, 12, False, False),
        (5, 5, 2, 24, 20, True, True),
        (2, 128, 8, 16, 16, True, False),
        (3, 3, 3, 16, 8, False, False),
    ],
)
def test_it_equals_the_exact_mixture(
    device: torch.device,
    plan: ExpertPlan,
    dtype: torch.dtype,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    renormalizes: bool,
    is_clamped: bool,
) -> None:
    experts = make_experts(num_experts, top_k, hidden, inner, dtype, device, renormalizes, is_clamped)
    x = draw(num_tokens, hidden, dtype=dtype, device=device)
    logits = draw(num_tokens, num_experts, dtype=dtype, device=device)
    kernels = make_kernels(copies=True)
    kernels.use(experts, [100], [plan])
    exact = mix_exactly(x, logits, experts)
    output = kernels.mix(x, logits, experts, None)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert experts.loads is not None
    assert int(experts.loads.sum()) == num_tokens * top_k

    residual = draw(num_tokens, hidden, dtype=dtype, device=device)
    exact = exact + residual.double()
    assert kernels.mix(x, logits, experts, residual) is residual
    torch.testing.assert_close(residual.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("plan", [STRAIGHT, GROUPED], ids=["straight", "grouped"])
@pytest.mark.parametrize("is_clamped", [False, True])
def test_ranks_with_parts_of_the_experts_add_up(device: torch.device, plan: ExpertPlan, is_clamped: bool) -> None:
    experts = make_experts(6, 3, 32, 16, torch.float32, device, is_clamped=is_clamped)
    x, logits = draw(4, 32, dtype=torch.float32, device=device), draw(4, 6, dtype=torch.float32, device=device)
    logits[:, 2:4] = -50.0  # no token chooses the second rank's
    total = torch.zeros_like(x)
    for first in (0, 2, 4):
        own, kernels = take_experts(experts, first, 2), make_kernels()
        kernels.use(own, [4], [plan])
        part = kernels.mix(x, logits, own, None)
        assert bool((part != 0).any()) == (first != 2)
        total += part
    torch.testing.assert_close(total.double(), mix_exactly(x, logits, experts), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("plan", [STRAIGHT, GROUPED], ids=["straight", "grouped"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_tokens", [3, 18])
@pytest.mark.parametrize("adds", [False, True])
def test_an_expert_of_all_tokens(
    device: torch.device, plan: ExpertPlan, dtype: torch.dtype, num_tokens: int, adds: bool
) -> None:
    experts = make_experts(4, 2, 24, 16, dtype, device)
    x, values, logits = (draw(num_tokens, size, dtype=dtype, device=device) for size in (24, 24, 4))
    residual = draw(num_tokens, 24, dtype=dtype, device=device) if adds else None
    gate = draw(1, 24, dtype=dtype, device=device)
    exact = mix_exactly(x, logits, experts) + torch.sigmoid(x.double() @ gate.double().T) * values.double()
    exact = exact if residual is None else exact + residual.double()
    kernels = make_kernels()
    kernels.use(experts, [18], [plan])
    output = kernels.mix(x, logits, experts, residual, ExpertOfAll(lambda: values, gate))
    torch.testing.assert_close(output.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_no_tokens(device: torch.device) -> None:
    experts = make_experts(4, 2, 16, 16, BF16, device)
    empty = torch.empty(0, 16, dtype=BF16, device=device)
    assert make_kernels().mix(empty, empty[:, :4], experts, None).shape == (0, 16)


def test_torch_may_multiply_the_second_matrices(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(F, "grouped_mm", multiply_plainly)
    experts = make_experts(4, 2, 32, 16, BF16, device, is_clamped=True)
    x, logits = draw(9, 32, dtype=BF16, device=device), draw(9, 4, dtype=BF16, device=device)
    kernels = make_kernels()
    kernels.use(experts, [9], [ExpertPlan(SMALL, None)])
    exact = mix_exactly(x, logits, experts)
    torch.testing.assert_close(kernels.mix(x, logits, experts, None).double(), exact, atol=3e-2, rtol=3e-2)


def multiply_plainly(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """x [r, k] and [experts, k, n] to [r, n]."""
    parts = torch.tensor_split(x, offs[:-1].long())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


@pytest.mark.parametrize("num_tokens", [1, 12])
@pytest.mark.parametrize("by_block", [False, True])
def test_weights_of_8_bits(device: torch.device, by_block: bool, num_tokens: int) -> None:
    """One token reads them as they are; inputs of several tokens are rounded too."""
    tile = GroupedTile(16, 64, 128, num_stages=2, num_warps=4)
    dense = make_experts(4, 2, 128, 128, BF16, device, is_clamped=not by_block)
    size = (128, 128) if by_block else (1, 128)
    (gate_up, gate_up_scales), (down, down_scales) = (
        [torch.stack(part) for part in zip(*(quantize(each, *size) for each in weight), strict=True)]
        for weight in (dense.gate_up, dense.down)
    )
    if not by_block:
        gate_up_scales, down_scales = gate_up_scales[:, :, 0].contiguous(), down_scales[:, :, 0].contiguous()
    experts = replace(
        dense, gate_up=gate_up, down=down, gate_up_scales=gate_up_scales, down_scales=down_scales, loads=None
    )
    x = draw(num_tokens, 128, dtype=BF16, device=device)
    logits = draw(num_tokens, 4, dtype=BF16, device=device)
    kernels = make_kernels()
    kernels.use(experts, [1, 12], [STRAIGHT, ExpertPlan(tile, tile)])
    wide = {} if by_block else {name: getattr(experts, name).float() for name in ("gate_up_bias", "down_bias")}
    exact = TorchOps().mix_experts(x.float(), logits.float(), replace(experts, **wide), None)
    output = kernels.mix(x, logits, experts, None)
    assert output.dtype == BF16
    assert float((output.float() - exact).norm() / exact.norm()) < (0.01 if num_tokens == 1 else 0.05)


def test_plans_go_by_tokens(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, used = make_experts(4, 1, 16, 16, BF16, device), list[ExpertPlan]()
    compute: Callable[..., None] = ExpertKernels.compute

    def record(kernels: ExpertKernels, plan: ExpertPlan, *rest: Any) -> None:
        used.append(plan)
        compute(kernels, plan, *rest)

    monkeypatch.setattr(ExpertKernels, "compute", record)
    kernels = make_kernels()
    kernels.use(experts, [2, 4], [STRAIGHT, GROUPED])
    for num_tokens in (2, 3, 5):
        x = draw(num_tokens, 16, dtype=BF16, device=device)
        kernels.mix(x, x[:, :4].contiguous(), experts, None)
    assert used == [STRAIGHT, GROUPED, choose_plan(5, 4, BF16)]


def test_plans_that_were_not_measured() -> None:
    """Straight while most experts have one token at most; then tiles by the average of an expert's rows."""
    assert choose_plan(64, 128, BF16) is STRAIGHT
    assert [choose_plan(pairs, 8, BF16).gated for pairs in (5, 192, 193, 768, 769)] == [
        TILES[index][1] for index in (0, 0, 1, 1, 2)
    ]
    exact = choose_plan(1000, 8, torch.float32).gated
    assert exact is not None
    assert exact not in [tile for _, tile in TILES]


def test_a_token_has_the_same_bits_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "INVARIANT", SMALL)
    experts = make_experts(6, 2, 32, 24, BF16, device)
    x, logits = draw(30, 32, dtype=BF16, device=device), draw(30, 6, dtype=BF16, device=device)
    gate = draw(1, 32, dtype=BF16, device=device)
    kernels = make_kernels(invariant=True)
    kernels.use(experts, [30], [STRAIGHT])  # is not used
    together = kernels.mix(x, logits, experts, None, ExpertOfAll(lambda: x, gate))
    for token in (0, 17):
        one = x[token : token + 1]
        of_all = ExpertOfAll(partial(torch.clone, one), gate)
        assert torch.equal(kernels.mix(one, logits[token : token + 1], experts, None, of_all)[0], together[token])
