from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from toka_async.kernels.fp8.quantize import quantize
from toka_async.kernels.fp8.scaled import TILES, ScaledTile, choose_scaled_tile, multiply_scaled
from toka_async.kernels.scaled_weight import Quantized, ScaledWeight
from toka_async.model.matrices import scaling as fp8

SMALL = ScaledTile(rows=16, columns=32, num_stages=2, num_warps=4)


def normal(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def operands(device: torch.device, by_block: bool, *shape: int) -> tuple[Quantized, ScaledWeight, Tensor]:
    """Rows, a weight, and the product of what they stand for in float64."""
    num_rows, n, k = shape
    x, numbers = normal(device, torch.bfloat16, num_rows, k), normal(device, torch.bfloat16, n, k) / k**0.5
    tile = (128, 128) if by_block else (1, k)
    rows, (weight, scales) = quantize(x, by_block), fp8.quantize(numbers, *tile)
    wide = fp8.dequantize(*rows, 1, tile[1]).double()
    exact = wide @ fp8.dequantize(weight, scales, *tile).double().T
    if by_block:  # lines of scales are padded
        scales = torch.nn.functional.pad(scales, (0, 3))
    return rows, ScaledWeight(weight, scales if by_block else scales[:, 0].contiguous()), exact


def check(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), exact, atol=2e-6 + rounding, rtol=2e-6 + rounding)


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 128, 128), (5, 96, 256), (37, 256, 384), (150, 160, 128)], ids=str)
def test_it_equals_the_product_of_what_the_values_stand_for(
    device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype, by_block: bool
) -> None:
    rows, weight, exact = operands(device, by_block, *shape)
    check(multiply_scaled(rows, weight, dtype, tile=SMALL), exact, dtype)


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("tile", list(itertools.chain(*TILES.values())), ids=repr)
def test_every_tile(device: torch.device, tile: ScaledTile, by_block: bool) -> None:
    rows, weight, exact = operands(device, by_block, 17, 256, 128)
    check(multiply_scaled(rows, weight, torch.bfloat16, tile=tile), exact, torch.bfloat16)


def test_tiles_are_as_large_as_keeps_a_chip_busy() -> None:
    sizes = [(rows, n) for n in (14_336, 4096, 1024) for rows in (1, 17, 200, 1000)]
    chosen = {size: choose_scaled_tile(*size) for size in sizes}
    of_wide = [(16, 64), (64, 64), (128, 128), (128, 128)]
    of_usual = [(16, 32), (64, 32), (64, 64), (128, 128)]
    of_narrow = [(16, 16), (64, 16), (64, 64), (64, 64)]
    assert [(tile.rows, tile.columns) for tile in chosen.values()] == [*of_wide, *of_usual, *of_narrow]
    assert choose_scaled_tile(0, 128) == TILES[16][-1]


@pytest.mark.parametrize("by_block", [False, True])
def test_bias_and_residual(device: torch.device, by_block: bool) -> None:
    rows, weight, exact = operands(device, by_block, 9, 64, 256)
    bias, residual = normal(device, torch.float32, 64), normal(device, torch.float32, 9, 64)
    expected = exact + bias.double() + residual.double()
    output = multiply_scaled(rows, weight, torch.float32, bias, residual, SMALL)
    assert output is residual
    check(output, expected, torch.float32)


def test_odd_sizes_of_channels(device: torch.device) -> None:
    rows, weight, exact = operands(device, False, 3, 37, 200)
    check(multiply_scaled(rows, weight, torch.float32), exact, torch.float32)


def test_no_rows(device: torch.device) -> None:
    rows, weight, _ = operands(device, True, 0, 128, 128)
    assert multiply_scaled(rows, weight, torch.bfloat16).shape == (0, 128)
