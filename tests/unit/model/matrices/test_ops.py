from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from toka_async.checkpoint.experts_spec import CLAMPED_SWIGLU
from toka_async.checkpoint.spec import ACTIVATIONS
from toka_async.model.matrices.ops import TorchOps

DEFINITIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(activation: str) -> None:
    gate_up = torch.tensor([[0.5, -2.0, 3.0, 4.0], [0.0, 1.5, 7.0, -1.0]])
    definition = DEFINITIONS[activation]
    expected = [[definition(gate) * up for gate, up in zip(row[:2], row[2:], strict=True)] for row in gate_up.tolist()]
    torch.testing.assert_close(TorchOps().gate(gate_up, activation), torch.tensor(expected))


def test_a_clamped_gate() -> None:
    """Both are limited, the gate from above only, and 1 is added to the second."""
    gate_up = torch.tensor([[0.5, -8.0, 9.0, 2.0, -9.0, 8.0]])
    expected = [gate / (1 + math.exp(-1.702 * gate)) * up for gate, up in ((0.5, 3.0), (-8.0, -6.0), (7.0, 8.0))]
    torch.testing.assert_close(TorchOps().gate(gate_up, CLAMPED_SWIGLU), torch.tensor([expected]))


def test_add_norm() -> None:
    x, residual, weight = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 1.0]]), torch.tensor([10.0, 1.0])
    normed, added = TorchOps().add_norm(x, residual, weight, eps=3.5)
    assert added.tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(normed, torch.tensor([[30.0, 4.0]]) / 4.0)  # rms: sqrt((9 + 16) / 2 + 3.5)


def test_a_first_norm_has_no_residual() -> None:
    x = torch.tensor([[3.0, 4.0]])
    normed, added = TorchOps().add_norm(x, None, torch.ones(2), eps=3.5)
    assert added.tolist() == x.tolist()
    torch.testing.assert_close(normed, x / 4.0)


def test_what_is_normed_is_the_rounded_sum() -> None:
    x, residual = torch.tensor([[1.0, 0.5]]).bfloat16(), torch.tensor([[256.0, 0.5]]).bfloat16()
    normed, added = TorchOps().add_norm(x, residual, torch.ones(2).bfloat16(), eps=0.0)
    assert added.tolist() == [[256.0, 1.0]]  # 257 is no bfloat16
    assert torch.equal(normed, TorchOps().add_norm(added, None, torch.ones(2).bfloat16(), eps=0.0)[0])


def test_a_norm_before_a_product() -> None:
    x, weight, bias = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0], [2.0, 0.0]]), torch.tensor([1.0, 0.5])
    norm = torch.tensor([4.0, 1.0]), 3.5  # makes [3, 1]
    torch.testing.assert_close(TorchOps().linear(x, weight, bias, norm), torch.tensor([[6.0, 6.5]]))
    gated = TorchOps().gated_linear(x, weight, bias, "gelu", norm)
    torch.testing.assert_close(gated, torch.tensor([[DEFINITIONS["gelu"](6.0) * 6.5]]))
