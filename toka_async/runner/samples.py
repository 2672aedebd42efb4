"""What a sampler returns: one draw for each row, with the log-probs that rows ask for.

Tensor ranks may divide the rows of a draw. Then each rank gets all logits of its rows and draws for these alone, and
only the drawn tokens are gathered. That divides both the work and the exchange by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.arrays import Int32, Int64
from toka_async.model.comm import Comm
from toka_async.model.logprobs import Logprobs
from toka_async.runner.copies import pack, upload


@dataclass(slots=True, frozen=True)
class TopLogprobs:
    """The likeliest tokens of m rows. rows: int64 [m] on the host. counts: int32 [m] on the host, ids of each row.

    ids: int64 or int32 [m, k], values: float32 [m, k], on the device; of_all: [s, k], of all rows of the draw.
    """

    rows: Int64
    counts: Int32
    ids: Tensor
    values: Tensor
    of_all: bool = False


@dataclass(slots=True, frozen=True)
class Draws:
    """One draw for each of s rows, on the device.

    token_ids: int64 or int32 [s]. chosen: float32 [s], log-probs of the drawn tokens, any value for rows that do not
    ask; None when no row asks. tops: the likeliest tokens of distinct rows, by who found them. kept, masses: int32 and
    float32 [s], tokens that a row's filters keep and their share of the distribution; 0 and 1 for rows that do not
    ask, or without filters; None when no row with filters asks.
    """

    token_ids: Tensor
    chosen: Tensor | None = None
    tops: tuple[TopLogprobs, ...] = ()
    kept: Tensor | None = None
    masses: Tensor | None = None

    def list_tensors(self) -> list[Tensor]:
        """Lists the tensors that travel to the host."""
        tensors = [self.token_ids.to(torch.int32)]
        if self.chosen is not None:
            tensors.append(self.chosen)
        if self.kept is not None:
            assert self.chosen is not None
            assert self.masses is not None
            tensors += [self.kept, self.masses]
        for top in self.tops:
            assert self.chosen is not None
            tensors += [top.ids.to(torch.int32), top.values]
        return tensors


class Sampler(Protocol):
    """Draws the next tokens of rows."""

    def sample(
        self,
        hidden: Tensor,
        slots: Int32,
        lengths: Int64,
        slots_at: Tensor,
        lengths_at: Tensor,
        before_draw: Callable[[], None] | None = None,
    ) -> Draws:
        """Draws one token for each row.

        Args:
            hidden: [s, hidden], s >= 1, the rows' last positions.
            slots: int32 [s] on the host; slots_at: the same, int64 on the device.
            lengths: int64 [s] on the host, tokens of the row so far; lengths_at: the same, int32 on the device.
            before_draw: called when all is launched that needs no masks.
        """
        ...


def make_draws(token_ids: Tensor, asked: Int64, num_top: Int32, logprobs: Logprobs | None) -> Draws:
    """Makes draws with the log-probs of the rows that ask: host indices [m], with counts of likeliest tokens [m]."""
    if logprobs is None:
        return Draws(token_ids)
    (rows,) = upload((asked,), token_ids.device)
    chosen = torch.zeros(len(token_ids), dtype=torch.float32, device=token_ids.device)
    chosen.index_copy_(0, rows, logprobs.chosen)
    has_top = bool(logprobs.top.shape[1])
    tops = (TopLogprobs(asked, num_top, logprobs.top_ids, logprobs.top),) if has_top else ()
    if logprobs.kept is None:
        return Draws(token_ids, chosen, tops)
    assert logprobs.masses is not None
    kept = torch.zeros(len(token_ids), dtype=torch.int32, device=token_ids.device)
    masses = torch.ones_like(chosen)
    kept.index_copy_(0, rows, logprobs.kept)
    masses.index_copy_(0, rows, logprobs.masses)
    return Draws(token_ids, chosen, tops, kept, masses)


def pack_drawn(drawn: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies what a draw returned into one memory, so that one copy brings it to the host. Token ids become int32."""
    parts = [drawn[0].to(torch.int32), *drawn[1:]]
    places = pack(parts).split_with_sizes([part.numel() for part in parts])
    return tuple(place.view(part.dtype).view(part.shape) for place, part in zip(places, parts, strict=True))


NO_ROWS: Int64 = np.empty(0, dtype=np.int64)
# (logits [r, vocab], slots int64 [r], contexts int32 [r]) to token ids int64 [r], and tensors int32 or float32 [r] or
# [r, n].
Draw = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(slots=True, frozen=True)
class RowShares:
    """How tensor ranks divide the rows of a draw; nothing touches the host.

    own_logits: computes the logits of the rank's own rows from hidden states of all rows, equally many for each rank.
    padding: a slot of no row, for rows that only fill up.
    """

    comm: Comm
    own_logits: Callable[[Tensor], Tensor]
    padding: int

    def count_rows(self, num_rows: int) -> int:
        """Counts the rows that each rank draws, padding included."""
        return -(-num_rows // self.comm.size)

    def draw(self, hidden: Tensor, slots: Tensor, contexts: Tensor, draw: Draw) -> tuple[Tensor, ...]:
        """Draws for s > 0 rows. Returns what `draw` would for all of them, the same on every rank.

        hidden: [s, hidden], slots: int64 [s] and contexts: int32 [s], the same on every rank.
        """
        num_rows = len(slots)
        size = self.count_rows(num_rows)
        missing = size * self.comm.size - num_rows
        if missing:
            hidden = F.pad(hidden, (0, 0, 0, missing))
            slots = F.pad(slots, (0, missing), value=self.padding)
            contexts = F.pad(contexts, (0, missing))
        own = slice(self.comm.rank * size, (self.comm.rank + 1) * size)
        token_ids, *rest = draw(self.own_logits(hidden), slots[own], contexts[own])
        parts = [token_ids.to(torch.int32), *(part.view(torch.int32) for part in rest)]
        columns = torch.cat([part.view(size, -1).t() for part in parts])
        gathered = self.comm.all_gather(columns, 1)[:, :num_rows]
        drawn = torch.split(gathered, [part.numel() // size for part in parts])
        shaped = (own.t() if part.dim() > 1 else own[0] for own, part in zip(drawn[1:], rest, strict=True))
        return drawn[0][0].long(), *(own.view(part.dtype) for own, part in zip(shaped, rest, strict=True))
