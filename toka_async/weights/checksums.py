"""Sums of a rank's parts of all tensors, which together tell whether an engine has a trainer's weights.

A tensor's sum is that of its values in the engine's dtype. What is quantized as it is loaded counts as the values that
it stands for: equal engines have equal sums, but a trainer would have to quantize its tensors too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from toka_async.control import PartSum
from toka_async.model.matrices.part import WeightPart
from toka_async.transfer.checksum import sum_part


@torch.inference_mode()
def sum_parts(parts: Mapping[str, WeightPart]) -> Iterator[PartSum]:
    """Ranks with the same part of a tensor have the same sum."""
    for name, part in parts.items():
        if not part.target.numel():
            continue
        for run, values in part.read():
            where = ",".join(f"{share.start}+{share.size}" for share in run)
            yield PartSum(name, where, sum_part(values, part.shape, [share.start for share in run]))
