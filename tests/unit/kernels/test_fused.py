from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from toka_async.checkpoint.experts_spec import CLAMPED_SWIGLU
from toka_async.checkpoint.spec import ACTIVATIONS
from toka_async.kernels.fused import FusedOps
from toka_async.model.matrices.ops import TorchOps

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)


def normal(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (2 * torch.randn(shape, generator=generator)).to(device, dtype)


def check(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 48), (33, 64), (70, 40), (3, 2048), (2, 3000)], ids=str)
def test_add_norm(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = normal(device, dtype, *shape), normal(device, dtype, *shape).flip(0)
    weight = normal(device, dtype, shape[1])
    normed, added = FusedOps().add_norm(x, residual, weight, 1e-5)
    check(added, residual.float() + x.float(), dtype)  # not equal: the interpreter truncates to bfloat16
    exact, _ = TorchOps().add_norm(added.float(), None, weight.float(), 1e-5)
    check(normed, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_first_norm_has_no_residual(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = normal(device, dtype, 5, 96), normal(device, dtype, 96)
    before = x.clone()
    normed, added = FusedOps().add_norm(x, None, weight, 0.5)
    assert added is x
    assert torch.equal(x, before)
    check(normed, TorchOps().add_norm(x.float(), None, weight.float(), 0.5)[0], dtype)


def test_inputs_stay_as_they_are(device: torch.device) -> None:
    x, residual = normal(device, torch.float32, 4, 32), normal(device, torch.float32, 4, 32) + 1
    before = x.clone(), residual.clone()
    FusedOps().add_norm(x, residual, torch.ones(32, device=device), 1e-6)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("activation", [*ACTIVATIONS, CLAMPED_SWIGLU])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (3, 2048), (2, 3000)], ids=str)
def test_gate(device: torch.device, shape: tuple[int, int], dtype: torch.dtype, activation: str) -> None:
    gate_up = normal(device, dtype, shape[0], 2 * shape[1])
    exact = TorchOps().gate(gate_up.float(), activation)
    check(FusedOps().gate(gate_up, activation), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 33, 2049])
def test_squares(device: torch.device, dtype: torch.dtype, size: int) -> None:
    """Of a part of each row; the same bits whatever the number of rows."""
    x = normal(device, dtype, 5, 2 * size)[:, :size]
    sums = FusedOps().sum_squares(x)
    check(sums, x.double().square().sum(-1).float(), torch.float32)
    check(TorchOps().sum_squares(x), x.double().square().sum(-1).float(), torch.float32)
    for row in range(5):
        for alone in (x[row : row + 1], x[row : row + 1].clone()):  # in place, and of another stride
            assert torch.equal(FusedOps().sum_squares(alone), sums[row : row + 1])
    assert FusedOps().sum_squares(x[:0]).shape == (0,)


def test_no_rows(device: torch.device) -> None:
    empty = torch.empty(0, 32, device=device)
    normed, added = FusedOps().add_norm(empty, empty, torch.ones(32, device=device), 1e-6)
    assert normed.shape == added.shape == (0, 32)
    assert FusedOps().gate(empty, "silu").shape == (0, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_may_have_float32_weights(device: torch.device, dtype: torch.dtype) -> None:
    """As those that are sums with 1."""
    x, weight = normal(device, dtype, 5, 64), normal(device, dtype, 96, 64) / 16
    factors = 1 + normal(device, torch.float32, 64) / 512
    exact = TorchOps().add_norm(x.float(), None, factors, 1e-5)[0]
    check(FusedOps().add_norm(x, None, factors, 1e-5)[0], exact, dtype)
    check(TorchOps().add_norm(x, None, factors, 1e-5)[0], exact, dtype)
    check(FusedOps().linear(x, weight, None, (factors, 1e-5)), exact @ weight.float().T, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_before_a_product(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = normal(device, dtype, 5, 64), normal(device, dtype, 96, 64) / 16
    bias, norm = normal(device, dtype, 96), (normal(device, dtype, 64), 1e-5)
    wide = x.float(), weight.float(), bias.float()
    plain, fused = TorchOps(), FusedOps()
    exact = plain.linear(*wide, (norm[0].float(), 1e-5))
    torch.testing.assert_close(fused.linear(x, weight, bias, norm).float(), exact, atol=5e-2, rtol=5e-2)
    exact = plain.gated_linear(*wide, "silu", (norm[0].float(), 1e-5))
    torch.testing.assert_close(fused.gated_linear(x, weight, bias, "silu", norm).float(), exact, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 33, 2049])
def test_output_gates(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """By a gate for each value, which lies among others."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(3, width, generator=generator).to(device, dtype)
    projected = torch.randn(3, 2 * width, generator=generator).to(device, dtype)
    gates = projected[:, :width]
    expected = TorchOps().apply_gates(x, gates)
    torch.testing.assert_close(FusedOps().apply_gates(x.clone(), gates), expected, atol=1e-6, rtol=1e-6)
    assert FusedOps().apply_gates(x[:0], gates[:0]).shape == (0, width)
