"""Mixtures of experts in plain torch, for CPUs: experts one after the other, each for the tokens that chose it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.kernels.experts.weights import ExpertWeights
from toka_async.model.ops import Ops


def choose_experts(logits: Tensor, top_k: int, renormalizes: bool) -> tuple[Tensor, Tensor]:
    """Returns the ids int64 [t, k] of each token's experts, likeliest first, and their shares float32 [t, k].

    logits: [t, experts]. The softmax is in float32; of equal experts the lower number is first.
    """
    shares = F.softmax(logits, -1, dtype=torch.float32)
    shares, ids = (each[:, :top_k] for each in torch.sort(shares, dim=-1, descending=True, stable=True))
    return ids, shares / shares.sum(-1, keepdim=True) if renormalizes else shares


class TorchExperts:
    """`ExpertOps` by the products of other operations, one for each expert. The host waits for the chosen experts."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def mix(self, x: Tensor, logits: Tensor, experts: ExpertWeights, residual: Tensor | None) -> Tensor:
        ids, shares = choose_experts(logits, experts.top_k, experts.renormalizes)
        if experts.loads is not None:
            experts.loads.add_(torch.bincount(ids.flatten(), minlength=len(experts.loads)))
        # Each pair's product, so that a token's sum is in the order of its experts, whatever the other tokens chose.
        products = x.new_zeros(*ids.shape, x.shape[1])
        for number, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True), experts.first):
            token, rank = torch.where(ids == number)
            if len(token):
                inner = self._ops.gated_linear(x[token], gate_up, None, experts.activation)
                products[token, rank] = self._ops.linear(inner, down)
        total = torch.zeros_like(x, dtype=torch.float32)
        for share, product in zip(shares.unbind(1), products.unbind(1), strict=True):
            total += share[:, None] * product
        return (total if residual is None else total + residual).to(x.dtype)
