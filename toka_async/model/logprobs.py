"""Log-probabilities of tokens: of the model's own distribution, or of a row's own at its temperature, as it is sampled.

Knows no requests and no rows beyond the tensors it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.copies import to_device
from toka_async.model.sampling import find_likeliest


@dataclass(slots=True, frozen=True)
class Logprobs:
    """Log-probs of m tokens.

    chosen: float32 [m]; top_ids: int64 [m, k]; top: float32 [m, k], likeliest first, ties by lowest id. ranks: int32
    [m], ranks of the chosen tokens among all, from 1. kept, masses: int32 and float32 [m], tokens that a row's filters
    keep and their share of the distribution; 0 and 1 for rows without filters. None where nobody asked.
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor
    ranks: Tensor | None = None
    kept: Tensor | None = None
    masses: Tensor | None = None


# Likeliest tokens are found in so many of a row, then in more of one that asks for more. Which of several equal ids
# are the last must not depend on how many another row wants.
_WIDTHS = (20, 128, 1024)
_ALIGNED = 4  # float32 values; a GPU adds a row in an order that depends on where these begin in it
_SMALLEST = torch.finfo(torch.float32).min


def distribution(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """log_softmax in float32, [m, vocab]; -inf becomes the smallest finite number, so that every value is finite.

    A row's values do not depend on the other rows, nor on its place among them.

    Args:
        temperature: float32 [m], above 0; None: 1 for all.
    """
    vocab = logits.shape[1]
    wide = logits.float()
    if temperature is not None:
        # The maximum first: no temperature overflows.
        wide = (wide - wide.amax(-1, keepdim=True).clamp_(min=_SMALLEST)).div_(temperature[:, None])
    if vocab % _ALIGNED:
        wide = F.pad(wide, (0, -vocab % _ALIGNED), value=-torch.inf)
    return wide.log_softmax(-1)[:, :vocab].nan_to_num_(nan=_SMALLEST, neginf=_SMALLEST)


def select_logprobs(distribution: Tensor, ids: Tensor, num_top: Int32) -> Logprobs:
    """Takes the log-probs of `ids`, int64 [m], and of the likeliest ids, from log-probs [m, vocab].

    num_top: [m], on the host, likeliest ids of each row; where a row has fewer than another, its others are undefined.
    """
    vocab = distribution.shape[1]
    chosen = distribution.gather(1, ids[:, None])[:, 0]
    most = min(int(num_top.max(initial=0)), vocab)
    top = torch.zeros(len(ids), most, dtype=torch.float32, device=ids.device)
    top_ids = torch.zeros(len(ids), most, dtype=torch.int64, device=ids.device)
    below = 0
    for width in (*_WIDTHS, vocab):
        rows = np.flatnonzero((num_top > below) & ((num_top <= width) | (width >= vocab)))
        below = width
        if not rows.size:
            continue
        if rows.size == num_top.size:
            values, found = find_likeliest(distribution, min(width, vocab))
            return Logprobs(chosen, found[:, :most], values[:, :most])
        at = to_device(rows, ids.device)
        values, found = (part[:, :most] for part in find_likeliest(distribution[at], min(width, vocab)))
        top[at, : values.shape[1]], top_ids[at, : values.shape[1]] = values, found
        if width >= vocab:
            break
    return Logprobs(chosen, top_ids, top)


def add_ranks(distribution: Tensor, ids: Tensor, logprobs: Logprobs) -> Logprobs:
    """Adds the ranks of `ids` [m] in log-probs [m, vocab], ties by lowest id, as among the likeliest ids."""
    chosen, places = logprobs.chosen[:, None], torch.arange(distribution.shape[1], device=ids.device)
    ahead = (distribution > chosen) | ((distribution == chosen) & (places < ids[:, None]))
    return replace(logprobs, ranks=ahead.sum(-1, dtype=torch.int32) + 1)


def keep_only_filtered(logprobs: Logprobs, num_kept: Tensor, masses: Tensor) -> Logprobs:
    """Renormalises log-probs to the tokens that filters keep: the first `num_kept` of a row, int64 [m].

    masses: float64 [m], their share of the distribution.
    """
    shift = masses.log()[:, None]
    left_out = torch.arange(logprobs.top.shape[1], device=num_kept.device) >= num_kept[:, None]
    return replace(
        logprobs,
        chosen=(logprobs.chosen - shift[:, 0]).float(),
        top=(logprobs.top - shift).float().masked_fill_(left_out, _SMALLEST),
        kept=num_kept.to(torch.int32),
        masses=masses.float(),
    )


def concatenate(parts: list[Logprobs]) -> Logprobs:
    """Concatenates at least one. All have ranks, or none; a part without measured filters has none."""
    if len(parts) == 1:
        return parts[0]
    if any(part.kept is not None for part in parts):
        parts = [part if part.kept is not None else _without_filters(part) for part in parts]
    most = max(part.top.shape[1] for part in parts)
    parts = [_widen(part, most) for part in parts]

    def join(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    return Logprobs(
        join("chosen"),
        join("top_ids"),
        join("top"),
        None if parts[0].ranks is None else join("ranks"),
        None if parts[0].kept is None else join("kept"),
        None if parts[0].masses is None else join("masses"),
    )


def take(logprobs: Logprobs, rows: Tensor) -> Logprobs:
    """Takes the log-probs of some rows, int64 [r], in their order."""
    optional = logprobs.ranks, logprobs.kept, logprobs.masses
    own = (None if column is None else column[rows] for column in optional)
    return Logprobs(logprobs.chosen[rows], logprobs.top_ids[rows], logprobs.top[rows], *own)


def _without_filters(logprobs: Logprobs) -> Logprobs:
    kept = torch.zeros(len(logprobs.chosen), dtype=torch.int32, device=logprobs.chosen.device)
    return replace(logprobs, kept=kept, masses=torch.ones_like(logprobs.chosen))


def _widen(logprobs: Logprobs, num_top: int) -> Logprobs:
    missing = num_top - logprobs.top.shape[1]
    if not missing:
        return logprobs
    return replace(logprobs, top_ids=F.pad(logprobs.top_ids, (0, missing)), top=F.pad(logprobs.top, (0, missing)))
