"""Mixtures of experts in plain torch, for CPUs: experts one after the other, each for the tokens that chose it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.kernels.experts.weights import ExpertOfAll, ExpertWeights
from toka_async.kernels.scaled_weight import BLOCK
from toka_async.model.matrices.scaling import dequantize

if TYPE_CHECKING:
    from toka_async.model.matrices.ops import Ops


def choose_experts(logits: Tensor, top_k: int, renormalizes: bool) -> tuple[Tensor, Tensor]:
    """Returns the ids int64 [t, k] of each token's experts, likeliest first, and their shares [t, k], in float32.

    logits: [t, experts]; shares of float64 are in float64.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    shares, ids = torch.sort(F.softmax(logits, -1, dtype=dtype), dim=-1, descending=True, stable=True)
    shares, ids = shares[:, :top_k], ids[:, :top_k]
    return ids, shares / shares.sum(-1, keepdim=True) if renormalizes else shares


def mix_experts(
    ops: Ops,
    x: Tensor,
    logits: Tensor,
    experts: ExpertWeights,
    residual: Tensor | None,
    of_all: ExpertOfAll | None = None,
) -> Tensor:
    """See `Ops.mix_experts`. Multiplies by `ops`. The host waits for the chosen experts; all tokens count."""
    ids, shares = choose_experts(logits, experts.top_k, experts.renormalizes)
    if experts.loads is not None:
        experts.loads.add_(torch.bincount(ids.flatten(), minlength=len(experts.loads)))
    # Each pair's product, so that a token's sum is in the order of its experts, whatever the other tokens chose.
    products = x.new_zeros(*ids.shape, x.shape[1])
    for place in range(len(experts.down)):
        token, rank = torch.where(ids == experts.first + place)
        if len(token):
            gate_up = _read(experts.gate_up, experts.gate_up_scales, place, x.dtype)
            inner = ops.gated_linear(x[token], gate_up, _read_bias(experts.gate_up_bias, place), experts.activation)
            down = _read(experts.down, experts.down_scales, place, x.dtype)
            products[token, rank] = ops.linear(inner, down, _read_bias(experts.down_bias, place))
    total = torch.zeros_like(x, dtype=shares.dtype)
    for share, product in zip(shares.unbind(1), products.unbind(1), strict=True):
        total += share[:, None] * product
    if of_all is not None:
        total += torch.sigmoid(ops.linear(x, of_all.gate)) * of_all.compute()
    return (total if residual is None else total + residual).to(x.dtype)


def _read_bias(bias: Tensor | None, place: int) -> Tensor | None:
    return None if bias is None else bias[place]


def _read(weight: Tensor, scales: Tensor | None, place: int, dtype: torch.dtype) -> Tensor:
    """Returns an expert's matrix [n, k], in the dtype if it is quantized."""
    if scales is None:
        return weight[place]
    values, own = weight[place], scales[place]
    if own.ndim == 1:
        return dequantize(values, own[:, None], 1, values.shape[1], dtype)
    return dequantize(values, own, BLOCK, BLOCK, dtype)
