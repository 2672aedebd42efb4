import numpy as np
import pytest

from toka_async.model.rng import draw_uniforms

_MASK = 2**64 - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@pytest.mark.parametrize(("seed", "index"), [(0, 0), (1, 0), (-1, 5), (2**63 - 1, 10**6), (-(2**63), 3)])
def test_equals_the_definition(seed: int, index: int) -> None:
    start = _mix(seed & _MASK)
    expected = (_mix((start + (index + 1) * 0x9E3779B97F4A7C15) & _MASK) >> 11) / 2**53
    assert draw_uniforms(np.array([seed]), np.array([index])).tolist() == [expected]


def test_splitmix64_known_answer() -> None:
    """The generator's first output for the state 1234567, from the reference implementation."""
    assert _mix((1234567 + 0x9E3779B97F4A7C15) & _MASK) == 6457827717110365317


@pytest.mark.parametrize("along", ["indices", "seeds"])
def test_uniform_along_a_stream_and_across_neighbouring_seeds(along: str) -> None:
    num, bins = 200_000, 200
    counter, fixed = np.arange(num), np.full(num, 17)
    draws = draw_uniforms(fixed, counter) if along == "indices" else draw_uniforms(counter, fixed)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.bincount((draws * bins).astype(np.int64), minlength=bins)
    chi_square = ((counts - num / bins) ** 2 / (num / bins)).sum()
    assert abs(chi_square - (bins - 1)) < 5 * np.sqrt(2 * (bins - 1))
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 5 / np.sqrt(num)


def test_streams_of_different_seeds_are_not_shifted_copies() -> None:
    draws = {seed: set(draw_uniforms(np.full(500, seed), np.arange(500)).tolist()) for seed in range(20)}
    assert len(set().union(*draws.values())) == 20 * 500
