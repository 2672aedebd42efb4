"""Random experts, and what a mixture of them is in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.kernels.experts.weights import ExpertWeights


def draw(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


def make_experts(
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device,
    renormalizes: bool = True,
    is_clamped: bool = False,
) -> ExpertWeights:
    """Makes all experts of a layer, which count their tokens. is_clamped: as gpt-oss has them, with biases."""
    gate_up_bias = draw(num_experts, 2 * inner, dtype=dtype, device=device, scale=6.0) if is_clamped else None
    return ExpertWeights(
        gate_up=draw(num_experts, 2 * inner, hidden, dtype=dtype, device=device, scale=hidden**-0.5),
        down=draw(num_experts, hidden, inner, dtype=dtype, device=device, scale=inner**-0.5 / (8 if is_clamped else 1)),
        first=0,
        top_k=top_k,
        renormalizes=renormalizes,
        activation="clamped_swiglu" if is_clamped else "silu",
        loads=torch.zeros(num_experts, dtype=torch.int64, device=device),
        gate_up_bias=gate_up_bias,
        down_bias=draw(num_experts, hidden, dtype=dtype, device=device) if is_clamped else None,
    )


def take_experts(experts: ExpertWeights, first: int, count: int) -> ExpertWeights:
    """Takes the part that one of several ranks has."""
    own = slice(first, first + count)
    gate_up, down = experts.gate_up[own].contiguous(), experts.down[own].contiguous()
    part = replace(experts, gate_up=gate_up, down=down, first=first, loads=None)
    if experts.gate_up_bias is None or experts.down_bias is None:
        return part
    return replace(part, gate_up_bias=experts.gate_up_bias[own], down_bias=experts.down_bias[own])


def mix_exactly(x: Tensor, logits: Tensor, experts: ExpertWeights) -> Tensor:
    """Computes in float64, token by token, the mixture [t, hidden] by the rank's experts."""
    sums = []
    for token, scores in zip(x.double(), F.softmax(logits.double(), -1), strict=True):
        ids = sorted(range(len(scores)), key=lambda number: (-float(scores[number]), number))[: experts.top_k]
        total = float(scores[ids].sum()) if experts.renormalizes else 1.0
        result = torch.zeros_like(token)
        for number in ids:
            place = number - experts.first
            if 0 <= place < len(experts.down):
                product = F.linear(token, experts.gate_up[place].double())
                if experts.gate_up_bias is not None and experts.down_bias is not None:
                    gate, up = (product + experts.gate_up_bias[place].double()).chunk(2)
                    gate = gate.clamp(max=7)
                    inner = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
                    output = F.linear(inner, experts.down[place].double(), experts.down_bias[place].double())
                else:
                    gate, up = product.chunk(2)
                    output = F.linear(F.silu(gate) * up, experts.down[place].double())
                result += float(scores[number]) / total * output
        sums.append(result)
    return torch.stack(sums)
