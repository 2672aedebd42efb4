"""Algorithms as numbers; what the library does with them needs a GPU (tests/gpu)."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p, string_at
from typing import Any, Literal

import pytest
import torch

from toka_async.kernels.cublaslt import CublasLt, Product


def test_an_algorithm_survives_as_numbers() -> None:
    library, words = object.__new__(CublasLt), [1, 2, 3, 0, 1 << 63, (1 << 64) - 1, 7, 8]
    assert library.save(library.restore(words)) == words


class PlayedLibrary:
    """Every function succeeds, but the heuristic, which answers as a test says.

    attributes: what the description of the operation was last told, by number. layouts: types, rows and columns.
    """

    def __init__(self, status: int) -> None:
        self.cublasLtMatmulAlgoGetHeuristic = lambda *_: status
        self.attributes: dict[int, int] = {}
        self.layouts: list[tuple[int, int, int]] = []

    def cublasLtMatmulDescSetAttribute(self, _: object, attribute: int, value: Any, size: Any) -> int:  # noqa: N802
        self.attributes[attribute] = int.from_bytes(string_at(value, size.value), "little")
        return 0

    def cublasLtMatrixLayoutCreate(self, _: object, kind: int, rows: Any, columns: Any, line: Any) -> int:  # noqa: N802
        assert line.value == rows.value
        self.layouts.append((kind, rows.value, columns.value))
        return 0

    def __getattr__(self, _: str) -> Callable[..., int]:
        return lambda *_: 0


def library_of(status: int) -> CublasLt:
    library = object.__new__(CublasLt)
    library._library = PlayedLibrary(status)  # type: ignore[assignment]
    library._handle = library._preference = c_void_p()
    library._descriptors = {}
    library._workspace = torch.empty(64)
    return library


def test_a_shape_without_proposals() -> None:
    product = Product(7, 5, torch.bfloat16, adds=False)
    assert library_of(0).algorithms(product, 3) == []
    assert library_of(15).algorithms(product, 3) == []
    with pytest.raises(OSError, match="status 7"):
        library_of(7).algorithms(product, 3)


@pytest.mark.parametrize(
    ("scaling", "modes", "is_fast"), [("channel", {31: 3, 32: 3}, 1), ("block", {31: 5, 32: 4}, 0)]
)
def test_the_library_is_told_of_scales(
    scaling: Literal["channel", "block"], modes: dict[int, int], is_fast: int
) -> None:
    """Numbers as in cublasLt.h: 3 a transposed A, 17 and 18 addresses, 25 fast sums, 31 and 32 kinds of scales."""
    library, product = library_of(0), Product(256, 128, torch.bfloat16, adds=False, scaling=scaling)
    assert library.algorithms(product, 3) == []
    played: Any = library._library
    somewhere = library._workspace.data_ptr()
    assert played.attributes == {3: 1, 17: somewhere, 18: somewhere, 25: is_fast, **modes}
    assert played.layouts == [(28, 128, 256), (28, 128, 1), (14, 256, 1)]
    of_x, of_weight = torch.ones(3), torch.ones(256)
    library._descriptors[product].set_scales(of_x.data_ptr(), of_weight.data_ptr())
    assert (played.attributes[17], played.attributes[18]) == (of_weight.data_ptr(), of_x.data_ptr())


def test_plain_products_have_no_scales() -> None:
    library = library_of(0)
    library.algorithms(Product(256, 128, torch.float16, adds=True), 3)
    played: Any = library._library
    assert played.attributes == {3: 1}
    assert played.layouts == [(2, 128, 256), (2, 128, 1), (2, 256, 1)]


@pytest.mark.parametrize("saved", [[], [1] * 7, [1] * 9, [-1] + [1] * 7, [1] * 7 + [1 << 64]], ids=str)
def test_numbers_that_are_no_algorithm(saved: list[int]) -> None:
    with pytest.raises(ValueError, match="expected 8 words of 64 bits"):
        object.__new__(CublasLt).restore(saved)
