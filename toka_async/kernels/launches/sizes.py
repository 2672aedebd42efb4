"""Sizes of grids and blocks. Triton's own functions do the same, but take microseconds: launches are full of them."""

from __future__ import annotations


def divide_up(count: int, size: int) -> int:
    """Counts the parts of this size that hold so many."""
    return -(-count // size)


def round_to_power(count: int) -> int:
    """Returns the smallest power of 2 that is at least `count`, which is positive."""
    return 1 << (count - 1).bit_length()
