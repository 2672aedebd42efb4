from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from toka_async.attention.rope import Rope, compute_rotation
from toka_async.checkpoint.rope_spec import RopeSpec
from toka_async.kernels import rotation

SPECS = {
    "default": RopeSpec(),
    "linear": RopeSpec(kind="linear", factor=4.0),
    "llama3": RopeSpec(kind="llama3", theta=5e5, factor=32.0, original_max_position=8192),
    "in part, scaled": RopeSpec(kind="yarn", part=0.5, factor=4.0, original_max_position=64, attention_factor=1.5),
    "yarn": RopeSpec(kind="yarn", factor=4.0, original_max_position=64, attention_factor=1.5),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 64), (7, 128), (40, 24), (9, 2048)])
def test_it_equals_plain_torch(device: torch.device, num_tokens: int, dim: int, spec: RopeSpec) -> None:
    positions = torch.randint(0, 131_072, (num_tokens + 1,), generator=torch.Generator().manual_seed(dim)).to(device)
    rope = Rope(spec, dim).to(device)
    for at in (positions[:-1], positions[1:]):  # the second at an odd address
        operands = at, rope.inverse_frequencies, rope.scale, torch.float32
        for actual, exact in zip(rotation.compute_rotation(*operands), compute_rotation(*operands), strict=True):
            assert actual.shape == (num_tokens, 1, spec.count_turned(dim))
            torch.testing.assert_close(actual, exact, atol=3e-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_it_is_rounded_at_the_end(device: torch.device, dtype: torch.dtype) -> None:
    positions, frequencies = torch.arange(100, device=device), Rope(RopeSpec(), 64).inverse_frequencies.to(device)
    exact = compute_rotation(positions, frequencies, 1.25, torch.float32)
    for actual, wide in zip(rotation.compute_rotation(positions, frequencies, 1.25, dtype), exact, strict=True):
        assert actual.dtype == dtype
        # The interpreter truncates to bfloat16.
        torch.testing.assert_close(actual.float(), wide, atol=0, rtol=torch.finfo(dtype).eps)


def test_no_tokens(device: torch.device) -> None:
    cos, sin = rotation.compute_rotation(
        torch.empty(0, dtype=torch.int64, device=device), torch.ones(8, device=device), 1.0, torch.float32
    )
    assert cos.shape == sin.shape == (0, 1, 16)
