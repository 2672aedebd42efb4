from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from toka_async.checkpoint.spec import ACTIVATIONS
from toka_async.kernels.fp8.quantize import quantize, quantize_gate, quantize_norm
from toka_async.kernels.scaled_weight import Quantized
from toka_async.model.matrices import scaling as fp8
from toka_async.model.matrices.ops import TorchOps

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def normal(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (2 * torch.randn(shape, generator=generator)).to(device, dtype)


def check(actual: Quantized, exact: Tensor, by_block: bool) -> None:
    """Nearly all values are those of the reference; a last bit of the arithmetic before may decide the others."""
    columns = 128 if by_block else exact.shape[1]
    values, scales = fp8.quantize(exact, 1, columns)
    actual_values, actual_scales = actual
    torch.testing.assert_close(actual_scales, scales, atol=0, rtol=1e-5)
    assert actual_values.dtype == fp8.FP8
    assert actual_values.is_contiguous()
    same = (actual_values.float() == values.float()).float().mean()
    assert same > 0.99
    again = fp8.dequantize(actual_values, actual_scales, 1, columns)
    torch.testing.assert_close(again, exact, atol=float(scales.max()) * 2**-9, rtol=0.07)


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 128), (5, 384), (8, 2304)], ids=str)
def test_as_they_are(device: torch.device, shape: tuple[int, int], dtype: torch.dtype, by_block: bool) -> None:
    x = normal(device, dtype, *shape)
    check(quantize(x, by_block), x.float(), by_block)


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 128), (5, 384), (33, 256), (3, 2048)], ids=str)
def test_a_norm(device: torch.device, shape: tuple[int, int], dtype: torch.dtype, by_block: bool) -> None:
    x, residual = normal(device, dtype, *shape), normal(device, dtype, *shape).flip(0)
    weight = normal(device, dtype, shape[1])
    rows, added = quantize_norm(x, residual, weight, 1e-5, by_block)
    assert added.dtype == dtype
    torch.testing.assert_close(added, residual + x)
    exact, _ = TorchOps().add_norm(added.float(), None, weight.float(), 1e-5)
    check(rows, exact, by_block)


def test_a_first_norm_has_no_residual(device: torch.device) -> None:
    x, weight = normal(device, torch.bfloat16, 5, 128), normal(device, torch.bfloat16, 128)
    rows, added = quantize_norm(x, None, weight, 0.5, True)
    assert added is x
    check(rows, TorchOps().add_norm(x.float(), None, weight.float(), 0.5)[0], True)


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 128), (5, 384), (3, 2304)], ids=str)
def test_a_gate(device: torch.device, shape: tuple[int, int], activation: str, by_block: bool) -> None:
    gate_up = normal(device, torch.bfloat16, shape[0], 2 * shape[1])
    check(quantize_gate(gate_up, activation, by_block), TorchOps().gate(gate_up.float(), activation), by_block)


def test_tokens_of_any_width(device: torch.device) -> None:
    x = normal(device, torch.bfloat16, 3, 200)
    check(quantize(x, False), x.float(), False)
    check(quantize_gate(x, "silu", False), TorchOps().gate(x.float(), "silu"), False)


@pytest.mark.parametrize(("num_rows", "padded"), [(0, 0), (1, 4), (4, 4), (6, 8)])
def test_scales_of_groups_lie_as_the_library_reads_them(device: torch.device, num_rows: int, padded: int) -> None:
    values, scales = quantize(torch.ones(num_rows, 256, device=device), True)
    assert values.shape == (num_rows, 256)
    assert scales.shape == (num_rows, 2)
    assert values.untyped_storage().nbytes() >= padded * 256
    assert not num_rows or scales.stride() == (1, padded)
    assert scales.data_ptr() % 16 == 0


def test_zeros_stay_zeros(device: torch.device) -> None:
    values, scales = quantize(torch.zeros(2, 128, device=device), False)
    assert not values.float().any()
    assert scales.isfinite().all()
