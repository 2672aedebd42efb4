"""Weights of the model's dtype are tested in test_mixture."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dataclasses import replace

from tests.cases.experts import draw, make_experts, mix_exactly
from toka_async.kernels.experts import few_tokens
from toka_async.kernels.experts.routing import route

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("by_block", [False, True])
def test_weights_of_8_bits_have_scales(device: torch.device, by_block: bool) -> None:
    """Of rows, or of blocks of 128 x 128 values."""
    experts = make_experts(3, 2, 256, 128, torch.float32, device)
    gate_up, down = experts.gate_up.to(FP8), experts.down.to(FP8)
    if by_block:
        scales = [draw(3, 2, 2, dtype=torch.float32, device=device), draw(3, 2, 1, dtype=torch.float32, device=device)]
        wide = [each.repeat_interleave(128, 1).repeat_interleave(128, 2) for each in scales]
    else:
        scales = [draw(3, 256, dtype=torch.float32, device=device) for _ in range(2)]
        wide = [each[:, :, None] for each in scales]
    x, logits = (draw(2, size, dtype=torch.float32, device=device) for size in (256, 3))
    routes, output = route(logits, 2, True), torch.empty_like(x)
    inner = few_tokens.multiply_gated(x, gate_up, routes, 0, "silu", scales[0])
    few_tokens.add_products(inner, down, routes, 0, output, False, scales[1])
    exact = replace(experts, gate_up=gate_up.float() * wide[0], down=down.float() * wide[1])
    torch.testing.assert_close(output.double(), mix_exactly(x, logits, exact), atol=1e-4, rtol=1e-4)
