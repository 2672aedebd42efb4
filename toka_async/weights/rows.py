"""The first rows of a tensor, as far as a rank has them, by which a trainer compares it with its own."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from toka_async.arrays import f32_column
from toka_async.control import PartRows
from toka_async.model.matrices.part import WeightPart
from toka_async.weights.catalog import UpdateError

MOST_VALUES = 1 << 22  # of an answer, each of which may take 20 bytes there


@torch.inference_mode()
def read_rows(name: str, part: WeightPart, num_rows: int) -> Iterator[PartRows]:
    """Yields each run of the rank's rows that is among the first ones. Raises UpdateError when these are too many."""
    count, *others = part.shape
    shape = min(count, num_rows), *others
    if prod(shape) > MOST_VALUES:
        most = MOST_VALUES // prod(others)
        raise UpdateError(f"{name} has shape {list(part.shape)}: {MOST_VALUES} values, or {most} rows, can be read")
    if not part.target.numel():  # other ranks have it
        return
    for run, values in part.read():
        first, *starts = (share.start for share in run)
        rows = values[: max(0, num_rows - first)].float().cpu()
        if len(rows):
            yield PartRows(
                shape=shape, starts=(first, *starts), sizes=tuple(rows.shape), values=f32_column(rows.numpy())
            )
