"""Builds a rank's part of a matrix in its weight format. A new format is an entry in `MATRICES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toka_async.checkpoint.matrix_spec import MatrixSpec
from toka_async.checkpoint.quantization import FORMATS
from toka_async.model.matrices.dense import DenseMatrix
from toka_async.model.matrices.fp8 import Fp8Matrix
from toka_async.model.matrices.matrix import Matrix
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.share import Place, Share, share_units, whole_of

MATRICES: dict[str, Callable[[MatrixSpec, Sequence[Share], Share, Ops], Matrix]] = {
    "dense": DenseMatrix,
    **dict.fromkeys(FORMATS, Fp8Matrix),
}


def build_matrix(spec: MatrixSpec, place: Place, ops: Ops) -> Matrix:
    """Builds unset parameters of torch's default dtype on its default device."""
    if spec.split == "outputs":
        outputs = [share_units(units, place) for units in spec.outputs]
        inputs = whole_of(spec.num_inputs)
    else:
        outputs = [whole_of(units.total) for units in spec.outputs]
        inputs = share_units(spec.inputs, place)
    return MATRICES[spec.format](spec, outputs, inputs, ops)
