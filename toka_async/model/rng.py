"""Random streams: one uniform number per draw, a function of (seed, index) only.

Counter-based, so a draw depends neither on the other rows of a step nor on when it is made: a sequence that is computed
again continues its stream. Knows no rows and no logits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Int64

Float64 = npt.NDArray[np.float64]
_UInt64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def draw_uniforms(seeds: Int64, indices: Int64) -> Float64:
    """Returns numbers in [0, 1) with 53 random bits.

    SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator. The mixer first scrambles the seed, so that
    neighbouring seeds do not give shifted copies of one stream. seeds: int64 [n], any values. indices: int64 [n], >= 0,
    positions in the streams.
    """
    start = _mix(seeds.view(np.uint64))
    bits = _mix(start + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: _UInt64) -> _UInt64:
    """Computes SplitMix64's finaliser, a bijection of 64 bits."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
