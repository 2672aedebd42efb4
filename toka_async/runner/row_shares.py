"""Divides the rows of a draw among the tensor ranks: each has all ids of its rows, and draws for these alone.

What moves between ranks, and the work of a draw, are then a rank's share of what they are when every rank gathers all
logits; only the drawn tokens are gathered. Nothing touches the host. Knows no parameters of sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.model.comm import Comm

# (logits [r, vocab], slots int64 [r], contexts int32 [r]) to token ids int64 [r] and log-probs float32 [r].
Draw = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(slots=True, frozen=True)
class RowShares:
    """own_logits: hidden states of all rows, as many for each rank, to the logits of the rank's own rows.

    padding: a slot that is no row's, for rows that only fill up.
    """

    comm: Comm
    own_logits: Callable[[Tensor], Tensor]
    padding: int

    def size(self, num_rows: int) -> int:
        """Rows that each rank draws, padding included."""
        return -(-num_rows // self.comm.size)

    def draw(self, hidden: Tensor, slots: Tensor, contexts: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """What all rows draw, the same on every rank: token ids int64 [s] and log-probs float32 [s].

        hidden: [s, hidden], slots: int64 [s] and contexts: int32 [s], the same on every rank.
        """
        num_rows = len(slots)
        if not num_rows:
            return slots.new_empty(0), hidden.new_empty(0, dtype=torch.float32)
        size = self.size(num_rows)
        missing = size * self.comm.size - num_rows
        if missing:
            hidden = F.pad(hidden, (0, 0, 0, missing))
            slots = F.pad(slots, (0, missing), value=self.padding)
            contexts = F.pad(contexts, (0, missing))
        own = slice(self.comm.rank * size, (self.comm.rank + 1) * size)
        token_ids, logprobs = draw(self.own_logits(hidden), slots[own], contexts[own])
        drawn = self.comm.all_gather(torch.stack([token_ids.to(torch.int32), logprobs.view(torch.int32)]), 1)
        return drawn[0, :num_rows].long(), drawn[1, :num_rows].view(torch.float32)
