"""Sums of a rank's parts of all tensors, which together tell whether an engine has a trainer's weights.

A dense tensor's sum is that of its values in the engine's dtype. Of a quantized one it is that of what is stored: equal
engines have equal sums, but a trainer cannot compute them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from toka_async.control import PartSum
from toka_async.model.matrices.part import WeightPart
from toka_async.transfer.checksum import sum_part


@torch.inference_mode()
def sum_parts(parts: Mapping[str, WeightPart], rank: int) -> Iterator[PartSum]:
    """rank: among the tensor ranks; ranks with the same part of a tensor have the same sum."""
    for name, part in parts.items():
        if not part.target.numel():
            continue
        values = part.target if part.restore is None else part.restore()
        if values.dim() > len(part.shares):
            values = values[0]  # it is repeated
        if part.store is not None and part.restore is None:
            yield PartSum(name, f"stored by {rank}", sum_part(values, values.shape, [0] * values.dim()))
            continue
        if part.order is not None:
            number = sum(run[0].size for run in part.runs)  # of rows; those that are there twice come later again
            values = values.index_select(0, part.order.argsort(stable=True)[:: len(values) // number].to(values.device))
        first = 0
        for run in part.runs:
            where = ",".join(f"{share.start}+{share.size}" for share in run)
            rows = values[first : first + run[0].size]
            yield PartSum(name, where, sum_part(rows, part.shape, [share.start for share in run]))
            first += run[0].size
