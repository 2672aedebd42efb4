"""The operations between a decoder's matrices and its attention, as a seam: a GPU fuses each into one kernel.

`TorchOps` is plain torch, for CPUs. Knows no layers and no parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.attention.rope import compute_rotation
from toka_async.checkpoint.experts_spec import CLAMPED_SWIGLU, SWIGLU_ALPHA, SWIGLU_LIMIT
from toka_async.kernels.experts.weights import ExpertOfAll, ExpertWeights
from toka_async.kernels.scaled_weight import ScaledOps
from toka_async.model.matrices.torch_experts import mix_experts

Norm = tuple[Tensor, float]  # an RMSNorm's weight [inputs] and epsilon


class Ops(Protocol):
    """Operations on [t, n] activations of any floating dtype.

    `add_linear`, `apply_gates` and `mix_experts` may write in place.
    """

    @property
    def scaled(self) -> ScaledOps | None:
        """Operations with weights of 8-bit floats; None: there are none."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """RMSNorm (arXiv:1910.07467) of the residual after `x` is added to it.

        x, residual: [t, hidden]; a residual of None counts as zeros. weight: [hidden], of x's dtype or float32. Returns
        both in x's dtype: rms_norm(sum) * weight, accumulated in float32, and the sum, which is rounded to the dtype
        first.
        """
        ...

    def sum_squares(self, x: Tensor) -> Tensor:
        """[t, n], a row contiguous, to [t], summed in float32, or x's dtype where that is wider."""
        ...

    def compute_rotation(
        self, positions: Tensor, inverse_frequencies: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `attention.rope.compute_rotation`."""
        ...

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """[t, 2 * inner] to [t, inner]: what `GATES` make of the halves, most of them activation(first) * second."""
        ...

    def apply_gates(self, x: Tensor, gates: Tensor) -> Tensor:
        """x [t, n], whose memory it may take, times the sigmoid of gates [t, n]."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """x Wᵀ + b: [t, inputs] and [outputs, inputs] to [t, outputs]. norm: of x, before."""
        ...

    def gated_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, norm: Norm | None = None
    ) -> Tensor:
        """`gate` of `linear`: [t, inputs] and [2 * inner, inputs] to [t, inner]."""
        ...

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Returns x Wᵀ + b [t, outputs], which is yet to be added to the residual, and the residual.

        The first is None if it was added to the residual in place.
        """
        ...

    def mix_experts(
        self,
        x: Tensor,
        logits: Tensor,
        experts: ExpertWeights,
        residual: Tensor | None,
        of_all: ExpertOfAll | None = None,
    ) -> Tensor:
        """Sums what each token's experts make of it, by its shares of them: the softmax of its logits, in float32.

        x: [t, hidden]; logits: [t, experts]. Of equal experts the lower number is chosen. of_all: one more expert, or
        the rank's part of it. Returns the part [t, hidden] of the rank's experts, added to the residual if there is
        one, whose memory it may take.
        """
        ...


class TorchOps:
    """`Ops` in plain torch."""

    scaled: ScaledOps | None = None

    compute_rotation = staticmethod(compute_rotation)

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if residual is not None:
            x = residual + x
        wide = x if weight.dtype == x.dtype else x.to(weight.dtype)
        return F.rms_norm(wide, weight.shape, weight, eps).to(x.dtype), x

    def sum_squares(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        return GATES[activation](*gate_up.chunk(2, dim=-1))

    def apply_gates(self, x: Tensor, gates: Tensor) -> Tensor:
        return x * torch.sigmoid(gates)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        if norm is not None:
            x = self.add_norm(x, None, *norm)[0]
        return F.linear(x, weight, bias)

    def gated_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, norm: Norm | None = None
    ) -> Tensor:
        return self.gate(self.linear(x, weight, bias, norm), activation)

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        return self.linear(x, weight, bias), residual

    def mix_experts(
        self,
        x: Tensor,
        logits: Tensor,
        experts: ExpertWeights,
        residual: Tensor | None,
        of_all: ExpertOfAll | None = None,
    ) -> Tensor:
        return mix_experts(self, x, logits, experts, residual, of_all)


def clamp_gate(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the halves as `CLAMPED_SWIGLU` multiplies them, the first of them with its sigmoid."""
    return gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1


def _gate_clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = clamp_gate(gate, up)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * up


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_pytorch_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    CLAMPED_SWIGLU: _gate_clamped,
}
