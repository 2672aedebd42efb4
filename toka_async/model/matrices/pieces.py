"""Lists what tensors of a checkpoint a rank's matrix is made of, and in which order their rows lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.model.matrices.share import JoinedShare, Share


@dataclass(slots=True, frozen=True)
class MatrixPiece:
    """A tensor's rows in a matrix.

    name: of the tensors, without what follows the last point. rows: of the rank's matrix. share: of the tensor's rows.
    order: int64 [rows], which of the rank's rows of the tensor each one is, maybe several the same; None: they are in
    order.
    """

    name: str
    rows: slice
    share: Share | JoinedShare
    order: Tensor | None


def list_pieces(spec: MatrixSpec, outputs: Sequence[Share]) -> Iterator[MatrixPiece]:
    """outputs: the rank's part of each of the checkpoint's matrices."""
    index = start = 0
    for name, group in groupby(spec.names):
        own = slice(index, index := index + len(list(group)))
        shares = outputs[own]
        orders = [_order_rows(units, share.size) for units, share in zip(spec.outputs[own], shares, strict=True)]
        if spec.fused:
            firsts = accumulate((share.size for share in shares), initial=0)
            orders = [first + order for first, order in zip(firsts, orders, strict=False)]
        rows = slice(start, start := start + sum(share.size for share in shares))
        share = JoinedShare(tuple(shares)) if spec.fused else shares[0]
        yield MatrixPiece(name, rows, share, _simplify(torch.cat(orders)))


def _order_rows(units: Units, num_rows: int) -> Tensor:
    rows = torch.arange(num_rows, device="cpu")
    if units.kinds:
        rows = rows.view(-1, units.size)
        return torch.cat([rows[:, first : first + size].flatten() for first, size in units.kinds])
    if not units.order:
        return rows
    return rows.view(-1, units.size)[:, torch.tensor(units.order, device="cpu")].flatten()


def _simplify(order: Tensor) -> Tensor | None:
    return None if torch.equal(order, torch.arange(len(order), device="cpu")) else order
