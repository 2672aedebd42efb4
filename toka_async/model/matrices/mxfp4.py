"""Experts' matrices in MXFP4, as gpt-oss publishes them, read as if they were stored in bfloat16.

A value has 4 bits (E2M1); 32 inputs of an output share a scale, a power of two (OCP Microscaling Formats 1.0).
bfloat16 holds the products exactly. Knows files' tensors, and nothing of what they are for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"  # what the names of a matrix's two tensors end with
_GROUP = 32  # values that share a scale, two in a byte
_BIAS = 127  # of a scale's exponent
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Slice:
    """All experts' matrices [experts, inputs, outputs], with the interface of a safetensors slice.

    blocks: a slice of uint8 [experts, outputs, groups, 16], the first value of a byte in its low bits. scales: uint8
    [experts, outputs, groups]. What is read is dequantized on the device.
    """

    def __init__(self, blocks: Any, scales: Tensor, device: torch.device) -> None:
        self._blocks = blocks
        self._scales = scales
        self._device = device

    def get_shape(self) -> list[int]:
        num_experts, num_outputs, num_groups, _ = self._blocks.get_shape()
        return [num_experts, num_groups * _GROUP, num_outputs]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, indices: tuple[slice, slice, slice]) -> Tensor:
        """Returns contiguous ranges, [experts, inputs, outputs]."""
        experts, inputs, outputs = indices
        groups = slice(inputs.start // _GROUP, -(-inputs.stop // _GROUP))
        blocks, scales = self._blocks[experts, outputs, groups], self._scales[experts, outputs, groups]
        first = inputs.start - groups.start * _GROUP
        shape = *scales.shape[:2], inputs.stop - inputs.start
        values = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        for target, *parts in zip(values, blocks, scales, strict=True):  # less memory than all experts at once
            target.copy_(dequantize(*(part.to(self._device) for part in parts))[:, first : first + shape[2]])
        return values.transpose(1, 2)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [n, groups, 16] and uint8 [n, groups] to float32 [n, groups * 32]."""
    each = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    pairs = torch.stack((each.repeat(16), each.repeat_interleave(16)), dim=1)  # of each byte
    values = F.embedding(blocks.int(), pairs).flatten(2)
    factors = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - _BIAS)
    return (values * factors[..., None]).flatten(1)
