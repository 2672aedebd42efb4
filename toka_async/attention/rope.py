"""Rotary position embeddings: frequencies once a model, cos and sin once a step, the rotation once a layer.

Angles are computed in float32 and never stored for all positions, so a long context costs no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from toka_async.checkpoint.rope_spec import RopeSpec

# Computes cos and signed sin from positions, inverse frequencies, their factor and their dtype; see below.
RotationFunction = Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]


def compute_rotation(
    positions: Tensor, inverse_frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Turns positions [t] into cos and signed sin times the scale, each [t, 1, turned] in the dtype.

    inverse_frequencies: float32 [turned / 2]. The first half of the sin is negated.
    """
    angles = positions[:, None].float() * inverse_frequencies  # [t, dim / 2]
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


class Rope(nn.Module):
    """Turns positions into the factors of a rotation, which `rotate` applies."""

    inverse_frequencies: Tensor

    def __init__(self, spec: RopeSpec | None, dim: int, compute: RotationFunction = compute_rotation) -> None:
        """spec: None: nothing turns. dim: of a head."""
        super().__init__()
        frequencies = torch.zeros(dim // 2, device="cpu") if spec is None else compute_frequencies(spec, dim)
        self.register_buffer("inverse_frequencies", frequencies.to(torch.get_default_device()), persistent=False)
        self.scale = 1.0 if spec is None else compute_scale(spec)
        self.query_growth = 0.0 if spec is None else spec.query_growth
        self.growth_period = 0 if spec is None else spec.original_max_position
        self._compute = compute

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Turns positions [t] into cos and signed sin, each [t, 1, turned]: of the dimensions of a head that turn."""
        return self._compute(positions, self.inverse_frequencies, self.scale, dtype)

    def compute_growth(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Turns positions [t] into the factors of queries, [t, 1, 1]; None: all are 1 (`RopeSpec.query_growth`)."""
        if not self.query_growth:
            return None
        growth = 1 + self.query_growth * torch.log1p(torch.floor(positions / self.growth_period))
        return growth.to(dtype)[:, None, None]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates heads [t, heads, dim]: of the first dimensions, which turn, i pairs with i + turned / 2."""
    cos, sin = rotation
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([rotate(x[..., :turned], rotation), x[..., turned:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(turned // 2, dims=-1), sin)


def compute_frequencies(spec: RopeSpec, dim: int) -> Tensor:
    """Computes the angle that each pair of dimensions turns per position: float32 [turned / 2], on the CPU.

    dim: of a head, of which the first dimensions turn.
    """
    turned = spec.count_turned(dim)
    if spec.kind != "proportional":
        return _compute_turning(spec, turned)
    frequencies = torch.zeros(dim // 2, dtype=torch.float32, device="cpu")  # what does not turn is in pairs as well
    frequencies[: turned // 2] = _compute_turning(spec, dim)[: turned // 2]
    return frequencies


def _compute_turning(spec: RopeSpec, dim: int) -> Tensor:
    """Computes those of all pairs of `dim` dimensions."""
    powers = spec.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if spec.kind == "linear":
        return 1.0 / powers / spec.factor
    if spec.kind == "llama3":
        return _scale_llama3(spec, 1.0 / powers)
    if spec.kind == "yarn":
        return _scale_yarn(spec, powers, dim)
    if spec.kind == "longrope":
        factors = spec.long_factors if spec.is_long else spec.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * powers)
    return 1.0 / powers


def compute_scale(spec: RopeSpec) -> float:
    """Computes the factor of cos and sin: 1 except for yarn (arXiv:2309.00071, section 3.4) and longrope."""
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.kind == "longrope":
        return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position)) if spec.factor > 1 else 1.0
    if spec.mscale and spec.mscale_all_dim:
        return _compute_mscale(spec.factor, spec.mscale) / _compute_mscale(spec.factor, spec.mscale_all_dim)
    return _compute_mscale(spec.factor, 1.0)


def _compute_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _scale_llama3(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Stretches long wavelengths, keeps short ones, and interpolates between (Llama 3.1)."""
    turns = spec.original_max_position * frequencies / (2 * math.pi)  # over the original context
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / spec.factor + smooth * frequencies


def _scale_yarn(spec: RopeSpec, powers: Tensor, dim: int) -> Tensor:
    """Keeps dimensions that turn often, stretches those that turn rarely, with a ramp between (section 3.2)."""
    low, high = _find_dim(spec, dim, spec.beta_fast), _find_dim(spec, dim, spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low or 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0.0, 1.0)
    return (1.0 / (spec.factor * powers)) * stretched + (1.0 / powers) * (1 - stretched)


def _find_dim(spec: RopeSpec, dim: int, turns: float) -> float:
    """Finds the dimension that turns `turns` times over the original context."""
    return dim * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))
