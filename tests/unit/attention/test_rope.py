from __future__ import annotations

import math

import pytest
import torch

from toka_async.attention.rope import Rope, compute_frequencies, compute_scale, rotate
from toka_async.checkpoint.rope_spec import RopeSpec


def test_default_frequencies() -> None:
    expected = torch.tensor([10000.0 ** (-i / 8) for i in (0, 2, 4, 6)])
    torch.testing.assert_close(compute_frequencies(RopeSpec(), 8), expected)


def test_linear_frequencies() -> None:
    scaled = compute_frequencies(RopeSpec(kind="linear", factor=4.0), 8)
    torch.testing.assert_close(scaled * 4, compute_frequencies(RopeSpec(), 8))


def test_llama3_keeps_short_and_stretches_long_wavelengths() -> None:
    spec = RopeSpec(kind="llama3", factor=8.0, original_max_position=64, low_freq_factor=1.0, high_freq_factor=4.0)
    plain, scaled = compute_frequencies(RopeSpec(), 32), compute_frequencies(spec, 32)
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 64 / 4, wavelengths > 64
    assert short.any()
    assert long.any()
    assert (~short & ~long).any()
    torch.testing.assert_close(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = scaled[~short & ~long] / plain[~short & ~long]
    assert ((between > 1 / 8) & (between < 1)).all()


def test_yarn_keeps_fast_and_stretches_slow_dimensions() -> None:
    spec = RopeSpec(kind="yarn", factor=4.0, original_max_position=4096)
    ratio = compute_frequencies(spec, 64) / compute_frequencies(RopeSpec(), 64)
    assert ratio[0] == 1.0
    assert ratio[-1] == 0.25
    assert (ratio.diff() <= 0).all()


@pytest.mark.parametrize(
    ("spec", "scale"),
    [
        (RopeSpec(kind="llama3", factor=8.0), 1.0),
        (RopeSpec(kind="yarn", factor=4.0), 0.1 * math.log(4) + 1),
        (RopeSpec(kind="yarn", factor=1.0), 1.0),
        (RopeSpec(kind="yarn", factor=4.0, attention_factor=1.5), 1.5),
        (RopeSpec(kind="yarn", factor=4.0, mscale=1.0), 0.1 * math.log(4) + 1),
        (RopeSpec(kind="yarn", factor=4.0, mscale=0.5, mscale_all_dim=0.5), 1.0),
    ],
)
def test_attention_scale(spec: RopeSpec, scale: float) -> None:
    assert compute_scale(spec) == pytest.approx(scale)


def test_rotation_is_that_of_complex_numbers() -> None:
    rope = Rope(RopeSpec(), 8)
    positions = torch.tensor([0, 1, 77])
    x = torch.randn(3, 2, 8)
    turned = torch.polar(torch.ones(3, 4), positions[:, None] * compute_frequencies(RopeSpec(), 8))
    expected = torch.complex(x[..., :4], x[..., 4:]) * turned[:, None]
    actual = rotate(x, rope(positions, torch.float32))
    torch.testing.assert_close(actual, torch.cat((expected.real, expected.imag), dim=-1))


def test_angles_are_float32_whatever_the_activations() -> None:
    cos, sin = Rope(RopeSpec(), 8)(torch.tensor([100_001]), torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert cos[0, 0, 0].item() == pytest.approx(math.cos(100_001), abs=5e-3)


def test_yarn_scales_cos_and_sin() -> None:
    cos, _ = Rope(RopeSpec(kind="yarn", factor=4.0, original_max_position=64, attention_factor=1.5), 8)(
        torch.tensor([0]), torch.float32
    )
    assert cos.tolist() == [[[1.5] * 8]]


def test_queries_grow_with_every_context_of_the_pre_training() -> None:
    rope = Rope(RopeSpec(kind="yarn", factor=4.0, original_max_position=16, query_growth=0.5), 8)
    growth = rope.compute_growth(torch.tensor([0, 15, 16, 47, 48]), torch.float32)
    assert growth is not None
    assert growth[:, 0, 0].tolist() == pytest.approx([1 + 0.5 * math.log(n) for n in (1, 1, 2, 3, 4)])
    assert Rope(RopeSpec(), 8).compute_growth(torch.tensor([0]), torch.float32) is None
