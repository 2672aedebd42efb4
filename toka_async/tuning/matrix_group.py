"""Matrices that steps use alike, for which one answer is enough, and the numbers of rows that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from toka_async.model.decoder import RankModel
from toka_async.model.matrices.matrix import Matrix, MatrixUse

_MOST_MATRICES = 8  # that are measured in turn


@dataclass(slots=True, frozen=True)
class MatrixGroup:
    """use: of the first matrix. matrices: some of those alike; more than one, so that they do not stay in caches."""

    use: MatrixUse
    matrices: list[Matrix] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class RowCounts:
    """The numbers of rows to tune for: those of graphs and any others up to the most, or exactly some."""

    most: int
    graphs: Sequence[int] = ()
    exact: Sequence[int] = ()


def group_matrices(decoder: RankModel) -> list[MatrixGroup]:
    """Groups a decoder's matrices by format, shape and use."""
    groups: dict[Any, MatrixGroup] = {}
    for use in decoder.uses():
        matrix = use.matrix
        alike = matrix.spec.format, matrix.shape, matrix.bias is None
        key = *alike, use.activation, use.adds, use.normed, use.of_samples
        group = groups.setdefault(key, MatrixGroup(use))
        if len(group.matrices) < _MOST_MATRICES:
            group.matrices.append(matrix)
    return list(groups.values())
