"""Algorithms as numbers; what the library does with them needs a GPU (tests/gpu)."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p

import pytest
import torch

from toka_async.kernels.cublaslt import CublasLt, Product


def test_an_algorithm_survives_as_numbers() -> None:
    library, words = object.__new__(CublasLt), [1, 2, 3, 0, 1 << 63, (1 << 64) - 1, 7, 8]
    assert library.save(library.restore(words)) == words


class PlayedLibrary:
    """Every function succeeds, but the heuristic, which answers as a test says."""

    def __init__(self, status: int) -> None:
        self.cublasLtMatmulAlgoGetHeuristic = lambda *_: status

    def __getattr__(self, _: str) -> Callable[..., int]:
        return lambda *_: 0


def library_of(status: int) -> CublasLt:
    library = object.__new__(CublasLt)
    library._library = PlayedLibrary(status)  # type: ignore[assignment]
    library._handle = library._preference = c_void_p()
    library._descriptors = {}
    return library


def test_a_shape_without_proposals() -> None:
    product = Product(7, 5, torch.bfloat16, adds=False)
    assert library_of(0).algorithms(product, 3) == []
    assert library_of(15).algorithms(product, 3) == []
    with pytest.raises(OSError, match="status 7"):
        library_of(7).algorithms(product, 3)


@pytest.mark.parametrize("saved", [[], [1] * 7, [1] * 9, [-1] + [1] * 7, [1] * 7 + [1 << 64]], ids=str)
def test_numbers_that_are_no_algorithm(saved: list[int]) -> None:
    with pytest.raises(ValueError, match="expected 8 words of 64 bits"):
        object.__new__(CublasLt).restore(saved)
