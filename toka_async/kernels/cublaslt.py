"""Multiplies matrices with cuBLASLt and an algorithm of the caller's choice.

torch takes the first algorithm that the library proposes for a shape; others of its proposals are often faster
(`tuning.algorithms` measures). Follows cublasLt.h of CUDA 12 and 13. Knows no layers and does not choose.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from typing import Any, Literal, NewType, Protocol, cast

import torch
from torch import Tensor

# Values of enumerations in cublasLt.h and library_types.h.
_COMPUTE_32F, _REAL_32F = 68, 0
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_E4M3 = 28
_TRANSPOSE_A = 3
_A_SCALE_POINTER, _B_SCALE_POINTER, _FAST_ACCUMULATION, _A_SCALE_MODE, _B_SCALE_MODE = 17, 18, 25, 31, 32
# Of weights and of x: "outer vectors"; "128 x 128 blocks" and "vectors of 128". On Hopper only, up to CUDA 13.0.
_SCALE_MODES = {"channel": (3, 3), "block": (5, 4)}
_LAYOUT_COLUMNS = 3
_MAX_WORKSPACE = 1
_TRANSPOSED = 1
_NOT_SUPPORTED = 15

_WORKSPACE_BYTES = 64 << 20
_MOST_ALGORITHMS = 16
_ALGORITHM_WORDS = 8  # "can be trivially serialized and later restored for use with the same version"
ALIGNMENT = 256  # bytes: the alignment of addresses that the library assumes


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; its algorithm is opaque."""

    _fields_ = (
        ("algorithm", c_uint64 * _ALGORITHM_WORDS),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


Algorithm = NewType("Algorithm", object)
Scales = tuple[Tensor, Tensor]  # of x and of W


@dataclass(slots=True, frozen=True)
class Product:
    """y = x Wᵀ, or y += x Wᵀ if it `adds`: x [m, k], W [n, k], y [m, n] of one dtype, for any m.

    scaling: x and W are E4M3, with scales in float32. `channel`: [m] of x and [n] of W. `block`: [k / 128, m] of x and
    [n / 128, l] of W, where l is k / 128 or more; m, n and l are multiples of 4.
    """

    n: int
    k: int
    dtype: torch.dtype
    adds: bool
    scaling: Literal["", "channel", "block"] = ""


class Library(Protocol):
    """Computes products; `CublasLt` is one."""

    @property
    def version(self) -> int:
        """Returns the version that saved algorithms belong to."""
        ...

    def algorithms(self, product: Product, m: int) -> list[Algorithm]:
        """Returns the proposals for `m` rows, likeliest first; any of them may suit other numbers of rows too.

        There may be none.
        """
        ...

    def run(
        self,
        product: Product,
        algorithm: Algorithm,
        x: Tensor,
        weight: Tensor,
        output: Tensor,
        scales: Scales | None = None,
    ) -> bool:
        """Computes all rows of the output on the current stream; x may have more memory than it says.

        Returns False, with nothing done, if the algorithm cannot.
        """
        ...

    def save(self, algorithm: Algorithm) -> list[int]:
        """Returns numbers from which `restore` makes the algorithm, in any process with this version of the library."""
        ...

    def restore(self, saved: Sequence[int]) -> Algorithm:
        """Raises ValueError for numbers of no algorithm. Whether the algorithm computes a product, `run` says."""
        ...


class _Descriptors:
    """The operation of one product, and the layouts of W, x and y as the library sees them, columns first."""

    def __init__(self, library: ctypes.PyDLL, product: Product, any_address: int) -> None:
        """any_address: for scales, without which the library proposes nothing; it does not read them for that."""
        self._library = library
        self.operation = c_void_p()
        _check(library.cublasLtMatmulDescCreate(byref(self.operation), _COMPUTE_32F, _REAL_32F))
        self._set(_TRANSPOSE_A, c_int(_TRANSPOSED))
        output = _TYPES[product.dtype]
        kind = _E4M3 if product.scaling else output
        if product.scaling:
            for attribute, mode in zip((_A_SCALE_MODE, _B_SCALE_MODE), _SCALE_MODES[product.scaling], strict=True):
                self._set(attribute, c_int(mode))
            self.set_scales(any_address, any_address)
            self._set(_FAST_ACCUMULATION, c_int8(product.scaling == "channel"))
        self.weight = self._layout(kind, product.k, product.n)
        self.x = self._layout(kind, product.k, 1)
        self.output = self._layout(output, product.n, 1)
        self.beta = c_float(1.0 if product.adds else 0.0)
        self._m = 1

    def set_scales(self, of_x: int, of_weight: int) -> None:
        """Sets the addresses of the scales."""
        self._set(_A_SCALE_POINTER, c_void_p(of_weight))
        self._set(_B_SCALE_POINTER, c_void_p(of_x))

    def _set(self, attribute: int, value: Any) -> None:
        size = c_size_t(sizeof(value))
        _check(self._library.cublasLtMatmulDescSetAttribute(self.operation, attribute, byref(value), size))

    def set_rows(self, m: int) -> None:
        """Sets the rows of x and y, which all products of a shape share within a step."""
        if m == self._m:
            return
        value = c_uint64(m)
        for layout in (self.x, self.output):
            _check(self._library.cublasLtMatrixLayoutSetAttribute(layout, _LAYOUT_COLUMNS, byref(value), c_size_t(8)))
        self._m = m

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        _check(
            self._library.cublasLtMatrixLayoutCreate(
                byref(layout), kind, c_uint64(rows), c_uint64(columns), c_int64(rows)
            )
        )
        return layout


class CublasLt:
    """The `Library` of a CUDA device, for products one after the other on one stream.

    Raises OSError without cuBLASLt.
    """

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"
        major = (torch.version.cuda or "").partition(".")[0]
        # The one that torch has loaded. A call takes microseconds, so it keeps the interpreter's lock: another thread
        # that gets the lock in between may hold it for longer than a small product takes.
        self._library = ctypes.PyDLL(f"libcublasLt.so.{major}")
        self._library.cublasLtGetVersion.restype = c_size_t
        self._library.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
        self._handle = c_void_p()
        _check(self._library.cublasLtCreate(byref(self._handle)))
        self._preference = c_void_p()
        _check(self._library.cublasLtMatmulPreferenceCreate(byref(self._preference)))
        size = c_size_t(_WORKSPACE_BYTES)
        _check(
            self._library.cublasLtMatmulPreferenceSetAttribute(
                self._preference, _MAX_WORKSPACE, byref(size), c_size_t(8)
            )
        )
        self.version = int(self._library.cublasLtGetVersion())
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._device = device
        self._alpha = c_float(1.0)
        self._descriptors: dict[Product, _Descriptors] = {}

    def algorithms(self, product: Product, m: int) -> list[Algorithm]:
        of = self._of(product)
        of.set_rows(m)
        found, count = (_Proposal * _MOST_ALGORITHMS)(), c_int()
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            of.operation,
            of.weight,
            of.x,
            of.output,
            of.output,
            self._preference,
            _MOST_ALGORITHMS,
            found,
            byref(count),
        )
        if status == _NOT_SUPPORTED:  # of this shape, by any algorithm
            return []
        _check(status)
        return [Algorithm(proposal.algorithm) for proposal in found[: count.value] if proposal.status == 0]

    def run(
        self,
        product: Product,
        algorithm: Algorithm,
        x: Tensor,
        weight: Tensor,
        output: Tensor,
        scales: Scales | None = None,
    ) -> bool:
        of = self._of(product)
        of.set_rows(output.shape[0])
        if scales is not None:
            of.set_scales(scales[0].data_ptr(), scales[1].data_ptr())
        output_at = output.data_ptr()
        status: int = self._library.cublasLtMatmul(
            self._handle,
            of.operation,
            byref(self._alpha),
            weight.data_ptr(),
            of.weight,
            x.data_ptr(),
            of.x,
            byref(of.beta),
            output_at,
            of.output,
            output_at,
            of.output,
            algorithm,
            self._workspace.data_ptr(),
            _WORKSPACE_BYTES,
            torch.cuda.current_stream(self._device).cuda_stream,
        )
        return status == 0

    def save(self, algorithm: Algorithm) -> list[int]:
        return list(cast(Iterable[int], algorithm))

    def restore(self, saved: Sequence[int]) -> Algorithm:
        if len(saved) != _ALGORITHM_WORDS or not all(0 <= word < 1 << 64 for word in saved):
            raise ValueError(f"expected {_ALGORITHM_WORDS} words of 64 bits, got {saved}")
        return Algorithm((c_uint64 * _ALGORITHM_WORDS)(*saved))

    def _of(self, product: Product) -> _Descriptors:
        known = self._descriptors.get(product)
        if known is None:
            known = self._descriptors[product] = _Descriptors(self._library, product, self._workspace.data_ptr())
        return known


def _check(status: int) -> None:
    if status:
        raise OSError(f"cuBLASLt: status {status}")
