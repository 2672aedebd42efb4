"""What a sampler gives: one draw for each row, with the log-probs that rows ask for.

Knows no slots and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32, Int64
from toka_async.model.logprobs import Logprobs
from toka_async.runner.copies import upload


@dataclass(slots=True, frozen=True)
class TopLogprobs:
    """Of m rows. rows: int64 [m] on the host. counts: int32 [m] on the host, of how many likeliest ids each.

    ids: int64 [m, k], values: float32 [m, k], on the device.
    """

    rows: Int64
    counts: Int32
    ids: Tensor
    values: Tensor


@dataclass(slots=True, frozen=True)
class Draws:
    """One draw for each of s rows, on the device.

    token_ids: int64 [s]. chosen: float32 [s], log-probs of the drawn tokens, anything for rows that do not ask; None
    when none does. top: of the likeliest tokens; None when no row asks.
    """

    token_ids: Tensor
    chosen: Tensor | None = None
    top: TopLogprobs | None = None

    def tensors(self) -> list[Tensor]:
        """All that travels to the host."""
        tensors = [self.token_ids.to(torch.int32)]
        if self.chosen is not None:
            tensors.append(self.chosen)
        if self.top is not None:
            assert self.chosen is not None
            tensors += [self.top.ids.to(torch.int32), self.top.values]
        return tensors


class Sampler(Protocol):
    """Draws the next tokens of rows."""

    def sample(self, hidden: Tensor, slots: Int32, lengths: Int64, slots_at: Tensor, lengths_at: Tensor) -> Draws:
        """Draw one token for each row.

        Args:
            hidden: [s, hidden], s >= 1, the rows' last positions.
            slots: int32 [s] on the host; slots_at: the same, int64 on the device.
            lengths: int64 [s] on the host, tokens of the row so far; lengths_at: the same, int32 on the device.
        """
        ...


def samples_of(token_ids: Tensor, asked: Int64, num_top: Int32, logprobs: Logprobs | None) -> Draws:
    """From the log-probs of the rows that ask, host indices [m] with counts of likeliest tokens [m]."""
    if logprobs is None:
        return Draws(token_ids)
    (rows,) = upload((asked,), token_ids.device)
    chosen = torch.zeros(len(token_ids), dtype=torch.float32, device=token_ids.device)
    chosen.index_copy_(0, rows, logprobs.chosen)
    if not logprobs.top.shape[1]:
        return Draws(token_ids, chosen)
    return Draws(token_ids, chosen, TopLogprobs(asked, num_top, logprobs.top_ids, logprobs.top))


NO_ROWS: Int64 = np.empty(0, dtype=np.int64)
