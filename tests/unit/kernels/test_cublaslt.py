"""Algorithms as numbers; what the library does with them needs a GPU (tests/gpu)."""

from __future__ import annotations

import pytest

from toka_async.kernels.cublaslt import CublasLt


def test_an_algorithm_survives_as_numbers() -> None:
    library, words = object.__new__(CublasLt), [1, 2, 3, 0, 1 << 63, (1 << 64) - 1, 7, 8]
    assert library.save(library.restore(words)) == words


@pytest.mark.parametrize("saved", [[], [1] * 7, [1] * 9, [-1] + [1] * 7, [1] * 7 + [1 << 64]], ids=str)
def test_numbers_that_are_no_algorithm(saved: list[int]) -> None:
    with pytest.raises(ValueError, match="expected 8 words of 64 bits"):
        object.__new__(CublasLt).restore(saved)
