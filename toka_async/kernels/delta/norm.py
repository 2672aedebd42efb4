"""Norms and gates what the heads of a Gated DeltaNet layer read from their states."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power

_TOKENS = 16  # of a program


def norm_outputs(read: Tensor, z: Tensor, offsets: Tensor | None, norm: Tensor, eps: float, output: Tensor) -> None:
    """Norms each head of [t, values] by the weight `norm` [value_dim], and gates it with z [t, values].

    output: [t, values], which may be `read`. offsets: see `StepChunks`: tokens that are in no chunk are left out; None:
    none is.
    """
    assert read.is_contiguous()
    assert output.is_contiguous()
    num_heads = read.shape[1] // len(norm)
    assert z.stride(1) == 1
    if len(read):
        _norm[num_heads, divide_up(len(read), _TOKENS)](
            read,
            z,
            z.stride(0),
            read if offsets is None else offsets,
            norm,
            output,
            len(read),
            of_chunks=offsets is not None,
            num_heads=num_heads,
            dim=len(norm),
            dim_pad=round_to_power(len(norm)),
            eps=eps,
            tokens=_TOKENS,
            num_warps=4,
        )


@launch_quickly
@triton.jit(do_not_specialize=["num_tokens"])
def _norm(
    read,
    z,
    z_stride,
    offsets,
    norm,
    output,
    num_tokens,
    of_chunks: tl.constexpr,
    num_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
    eps: tl.constexpr,
    tokens: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64) * tokens + tl.arange(0, tokens)
    head, j = tl.program_id(0), tl.arange(0, dim_pad)
    wanted = token < num_tokens
    if of_chunks:
        wanted = tl.load(offsets + token, mask=wanted, other=0) > 0
    inside = wanted[:, None] & (j < dim)[None, :]
    place = (token * num_heads + head)[:, None] * dim + j[None, :]
    x = tl.load(read + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + token[:, None] * z_stride + (head * dim + j)[None, :], mask=inside, other=0.0)
    weight = tl.load(norm + j, mask=j < dim, other=0.0)[None, :]
    factor = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)[:, None]
    tl.store(output + place, norm_gated(x, factor, weight, gate), mask=inside)


@triton.jit
def norm_gated(read, factor, weight, gate):
    """Norms what was read by its factor, and gates it, in the gate's dtype; rounds as a model in this dtype does."""
    dtype: tl.constexpr = gate.dtype
    normed = ((read * factor).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)
    opened = gate.to(tl.float32)
    return (normed * opened * tl.sigmoid(opened)).to(dtype)
