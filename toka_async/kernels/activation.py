"""Gated activations of float32 values, for kernels to call."""

from __future__ import annotations

import triton
import triton.language as tl

NAMES = ("silu", "gelu", "gelu_pytorch_tanh", "clamped_swiglu")


@triton.jit
def activate(x, up, activation: tl.constexpr):
    """Returns the activation of x, times up; see `checkpoint.experts_spec.CLAMPED_SWIGLU` for the last."""
    if activation == "clamped_swiglu":
        x = tl.minimum(x, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        share = tl.sigmoid(1.702 * x)
    elif activation == "silu":
        share = tl.sigmoid(x)
    elif activation == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    else:  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x * share * up
