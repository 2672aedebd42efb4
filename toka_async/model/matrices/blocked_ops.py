"""`Ops` in plain torch whose results for a row are the same bits, whatever other rows are computed with it.

A library chooses how it sums by the shape of a product, so every product here has the same number of rows.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.checkpoint.experts_spec import CLAMPED_SWIGLU, SWIGLU_ALPHA
from toka_async.model.matrices.ops import Norm, TorchOps, clamp_gate

ROWS = 16  # of a product; fewer waste less on few rows, more read the weights less often
# MKL sums products of fewer than 12 outputs in an order that depends on the row's place, among rows and in memory.
_FEWEST_OUTPUTS = 16


class BlockedOps(TorchOps):
    """Multiplies blocks of `ROWS` rows, the last one filled up with zeros."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        if norm is not None:
            x = self.add_norm(x, None, *norm)[0]
        num_outputs = len(weight)
        if num_outputs < _FEWEST_OUTPUTS:
            weight = F.pad(weight, (0, 0, 0, _FEWEST_OUTPUTS - num_outputs))
            bias = None if bias is None else F.pad(bias, (0, _FEWEST_OUTPUTS - num_outputs))
        padded = F.pad(x, (0, 0, 0, -len(x) % ROWS))
        products = [F.linear(part, weight, bias) for part in torch.split(padded, ROWS)]
        return torch.cat(products)[: len(x), :num_outputs].contiguous()

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == CLAMPED_SWIGLU:
            gate, up = clamp_gate(gate, up)
        return _activate(gate.float(), activation).to(gate.dtype) * up


def _activate(x: Tensor, activation: str) -> Tensor:
    """Computes the activation from operations that torch rounds alike in vectors and in what is left over of them.

    `F.silu` and `F.gelu` do not: what an element becomes depends on its place in memory.
    """
    if activation == CLAMPED_SWIGLU:
        return x / (1 + torch.exp(-SWIGLU_ALPHA * x))
    if activation == "silu":
        return x / (1 + torch.exp(-x))
    if activation == "gelu":
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))
    assert activation == "gelu_pytorch_tanh", activation
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
