"""The memory in which programs that share a prefix's keys leave their partial results."""

from __future__ import annotations

import torch
from torch import Tensor

from toka_async.kernels.decode import Partial

MOST_PARTIALS = 1 << 26  # numbers


class PrefixMemory:
    """A slab that stays where it is, since graphs hold its address.

    It is taken at once, so that a cache which is sized later leaves room for it. Attention parts of one stream may
    share it.
    """

    def __init__(self, device: torch.device, most: int, dtype: torch.dtype) -> None:
        """most: numbers of all partial results at a time. dtype: of queries; the kernels compute in float32."""
        self.most = most
        self._slab = torch.empty(most, dtype=dtype, device=device)

    def take(self, query: Tensor, parts: int, output: Tensor) -> Partial:
        """Takes room for `parts` results of the queries [rows, heads, dim]; a single one lies in `output`."""
        lse = torch.empty((parts, *query.shape[:2]), dtype=torch.float32, device=query.device)
        if parts == 1:
            return Partial(output[None], lse)
        return Partial(self._slab[: parts * query.numel()].view(parts, *query.shape), lse)


def count_partials(device: torch.device) -> int:
    """Counts the numbers of partial results for which there is room: in 16 bits 0.2 % of a GPU's memory at most."""
    if device.type != "cuda":
        return 1 << 20
    total = torch.cuda.get_device_properties(device).total_memory
    return min(MOST_PARTIALS, 1 << (total // 1024).bit_length() - 1)
