"""Numbers as JSON, of many at once: rows of bytes of one width, with padding among them where a number is short.

Knows arrays of numbers; what they count is the caller's business.
"""

from __future__ import annotations

import numpy as np

from toka_async.arrays import Float32, Int32, Int64
from toka_async.text.byte_table import PAD, Bytes

DECIMALS = 7  # as many as a float32 of size 1 has
LARGEST = 9999.0
_DIGITS: Bytes = np.array([list(b"%04d" % i) for i in range(10000)], np.uint8)
_SHORT: Bytes = np.array([list((b"%d" % i).rjust(4, bytes([PAD]))) for i in range(10000)], np.uint8)
_MINUS, _POINT = ord("-"), ord(".")


def decimals(values: Float32) -> tuple[Bytes, Int32]:
    """Each value with `DECIMALS` decimals [t, 13], and its length [t].

    What is larger than LARGEST, either way, becomes that; what is no number becomes -LARGEST.
    """
    held = np.clip(np.fmax(values, np.float32(-LARGEST)), -LARGEST, LARGEST).astype(np.float64)
    scaled = np.rint(np.abs(held) * 10**DECIMALS).astype(np.int64)
    whole, fraction = np.divmod(scaled, 10**DECIMALS)
    high, low = np.divmod(fraction, 10000)
    negative = (held < 0) & (scaled > 0)
    rows: Bytes = np.empty((values.size, 13), np.uint8)
    rows[:, 0] = np.where(negative, np.uint8(_MINUS), np.uint8(PAD))
    rows[:, 1:5] = _SHORT.take(whole, axis=0)
    rows[:, 5] = _POINT
    rows[:, 6:9] = _DIGITS[:, 1:].take(high, axis=0)
    rows[:, 9:13] = _DIGITS.take(low, axis=0)
    return rows, _num_digits(whole) + np.int32(1 + DECIMALS) + negative


def integers(values: Int64) -> tuple[Bytes, Int32]:
    """Each value from 0 to 10^8 - 1 [t, 8], and its length [t]."""
    assert values.size == 0 or (values.min() >= 0 and values.max() < 10**8)
    high, low = np.divmod(values, 10000)
    rows: Bytes = np.full((values.size, 8), PAD, np.uint8)
    rows[:, 4:] = _SHORT.take(low, axis=0)
    lengths = _num_digits(low)
    large = np.flatnonzero(high)
    rows[large, :4] = _SHORT.take(high[large], axis=0)
    rows[large, 4:] = _DIGITS.take(low[large], axis=0)
    lengths[large] = _num_digits(high[large]) + 4
    return rows, lengths


def _num_digits(values: Int64) -> Int32:
    """Of values below 10,000; 0 has one."""
    return ((values >= 10) + (values >= 100).astype(np.int32) + (values >= 1000) + 1).astype(np.int32)
