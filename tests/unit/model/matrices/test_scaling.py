from __future__ import annotations

import pytest
import torch

from toka_async.model.matrices.scaling import FP8, dequantize, quantize


@pytest.mark.parametrize(("rows", "columns"), [(1, 300), (1, 128), (128, 128), (200, 1), (7, 9)])
def test_numbers_are_near_what_they_were(rows: int, columns: int) -> None:
    numbers = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, scales = quantize(numbers, rows, columns)
    assert values.dtype == FP8
    assert scales.dtype == torch.float32
    assert scales.shape == (-(-200 // rows), -(-300 // columns))
    again = dequantize(values, scales, rows, columns)
    # Three bits of mantissa: half of the last one is a sixteenth; below the normal numbers, steps of 2 ** -9.
    near = (again - numbers).abs() <= numbers.abs() / 16 + scales.max() * 2**-10
    assert near.all()


def test_the_largest_number_of_a_tile_is_kept() -> None:
    numbers = torch.tensor([[1.0, -3.5, 0.0, 2.0], [0.0, 0.0, 7.0, 1e-3]])
    values, scales = quantize(numbers, 1, 2)
    assert values.float().abs().amax(1).tolist() == [448.0, 448.0]
    assert torch.equal(scales * 448, torch.tensor([[3.5, 2.0], [1e-10, 7.0]]))
    assert torch.equal(dequantize(values, scales, 1, 2)[:, 1:3], numbers[:, 1:3])


def test_zeros_stay_zeros() -> None:
    values, scales = quantize(torch.zeros(3, 5), 2, 2)
    assert torch.equal(dequantize(values, scales, 2, 2), torch.zeros(3, 5))
