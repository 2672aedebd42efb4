from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from toka_async.model.matrices.mxfp4 import Mxfp4Slice, dequantize

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
EXPERTS, OUTPUTS, GROUPS = 3, 6, 4


def draw() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (EXPERTS, OUTPUTS, GROUPS, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(90, 160, (EXPERTS, OUTPUTS, GROUPS), generator=generator, dtype=torch.uint8)


def test_a_byte_holds_two_values_the_first_in_its_low_bits() -> None:
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, :2] = torch.tensor([0x21, 0xF7], dtype=torch.uint8)
    blocks[0, 1, 15] = 0x90
    numbers = dequantize(blocks, torch.tensor([[127, 130]], dtype=torch.uint8))
    assert numbers[0, :5].tolist() == [0.5, 1.0, 6.0, -6.0, 0.0]
    assert numbers[0, 62:].tolist() == [0.0, -4.0]  # -0.5 * 2 ** 3


def test_every_value_and_scale() -> None:
    blocks, scales = draw()
    numbers = dequantize(blocks[0], scales[0])
    for output, group, place in ((0, 0, 0), (5, 3, 31), (2, 1, 17)):
        byte, scale = int(blocks[0, output, group, place // 2]), int(scales[0, output, group])
        expected = VALUES[byte >> 4 if place % 2 else byte & 15] * 2.0 ** (scale - 127)
        assert float(numbers[output, 32 * group + place]) == expected
    assert torch.equal(numbers, numbers.bfloat16().float())


@pytest.mark.parametrize(
    ("experts", "inputs", "outputs"),
    [((0, 3), (0, 128), (0, 6)), ((1, 2), (32, 64), (2, 4)), ((2, 3), (40, 100), (0, 3)), ((0, 0), (0, 128), (0, 6))],
)
def test_any_range_is_read(
    tmp_path: Path, experts: tuple[int, int], inputs: tuple[int, int], outputs: tuple[int, int]
) -> None:
    """Of whole groups and of parts of these."""
    blocks, scales = draw()
    save_file({"w_blocks": blocks}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        whole = Mxfp4Slice(file.get_slice("w_blocks"), scales, torch.device("cpu"))
        assert (whole.get_shape(), whole.get_dtype()) == ([EXPERTS, 32 * GROUPS, OUTPUTS], "BF16")
        part = whole[slice(*experts), slice(*inputs), slice(*outputs)]
    exact = torch.stack([dequantize(*each).T for each in zip(blocks, scales, strict=True)])
    assert torch.equal(part.float(), exact[slice(*experts), slice(*inputs), slice(*outputs)])
