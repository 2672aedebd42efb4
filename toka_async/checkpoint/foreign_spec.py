"""Layers that another library computes, as data: what our attention, cache and accounts of memory need of them.

Knows no torch and no files.
"""

from __future__ import annotations

import msgspec

from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.matrix_spec import MatrixSpec, Units


class ForeignAttentionSpec(AttentionSpec, frozen=True, tag="foreign_attention", kw_only=True):
    """Attention whose projections, norms and rotation are the library's, so that ours takes what it makes of them.

    module: the name of what attends, in the library's model. value_dim: of a value head, which is filled up to
    head_dim. factor: of queries, where a layer's scale is not that of the others. divides: tensor ranks divide the
    heads; otherwise each has all of them. num_others: the layer's parameters beside its matrices.
    """

    module: str
    value_dim: int
    factor: float = 1.0
    divides: bool = True
    num_others: int = 0

    def can_divide(self, tp: int) -> bool:
        return not self.divides or (self.num_heads % tp == 0 and self.num_kv_heads % tp == 0)

    def divide(self, tp: int) -> ForeignAttentionSpec:
        if not self.divides:
            return self
        return msgspec.structs.replace(self, num_heads=self.num_heads // tp, num_kv_heads=self.num_kv_heads // tp)

    def list_matrices(self, hidden_size: int, format: str) -> tuple[MatrixSpec, ...]:  # noqa: ARG002
        """Returns none: all of a layer's are its feed's."""
        return ()

    def count_weights(self) -> int:
        return self.num_others


class ForeignFeedSpec(msgspec.Struct, frozen=True, tag="foreign_feed", kw_only=True):
    """All matrices of a layer. whole: those that each tensor rank has all of. num_values: of a token, alive at once."""

    divided: tuple[MatrixSpec, ...]
    whole: tuple[MatrixSpec, ...] = ()
    num_values: int = 0

    def can_divide(self, tp: int) -> bool:
        return all(units.count % tp == 0 for matrix in self.divided for units in _split_side(matrix))

    def divide(self, tp: int) -> ForeignFeedSpec:
        return msgspec.structs.replace(self, divided=tuple(_divide(matrix, tp) for matrix in self.divided))

    def describe(self) -> str:
        """Names what tensor ranks divide."""
        return "matrices"

    def list_matrices(self, hidden_size: int, format: str) -> tuple[MatrixSpec, ...]:  # noqa: ARG002
        return *self.divided, *self.whole

    def count_values(self, hidden_size: int) -> int:  # noqa: ARG002
        return self.num_values


def _split_side(matrix: MatrixSpec) -> tuple[Units, ...]:
    return matrix.outputs if matrix.split == "outputs" else (matrix.inputs,)


def _divide(matrix: MatrixSpec, tp: int) -> MatrixSpec:
    parts = tuple(msgspec.structs.replace(units, count=units.count // tp) for units in _split_side(matrix))
    if matrix.split == "outputs":
        return msgspec.structs.replace(matrix, outputs=parts)
    return msgspec.structs.replace(matrix, inputs=parts[0])
