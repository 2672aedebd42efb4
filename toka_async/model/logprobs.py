"""Log-probabilities of the raw distribution: before temperature, penalties, bias and filters.

Knows no requests and no rows beyond the tensors it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.model.sampling import find_likeliest


@dataclass(slots=True, frozen=True)
class Logprobs:
    """Log-probs of m tokens.

    chosen: float32 [m]; top_ids: int64 [m, k]; top: float32 [m, k], likeliest first, ties by lowest id. ranks: int32
    [m], ranks of the chosen tokens among all, from 1; None unless requested.
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor
    ranks: Tensor | None = None


_MOST_TOP = 20  # likeliest tokens that a request may ask for
_ALIGNED = 4  # float32 values; a GPU adds a row in an order that depends on where these begin in it


def distribution(logits: Tensor) -> Tensor:
    """log_softmax in float32, [m, vocab]; -inf becomes the smallest finite number, so that every value is finite.

    A row's values do not depend on the other rows, nor on its place among them.
    """
    smallest, vocab = torch.finfo(torch.float32).min, logits.shape[1]
    wide = logits.float()
    if vocab % _ALIGNED:
        wide = F.pad(wide, (0, -vocab % _ALIGNED), value=-torch.inf)
    return wide.log_softmax(-1)[:, :vocab].nan_to_num_(nan=smallest, neginf=smallest)


def select_logprobs(distribution: Tensor, ids: Tensor, num_top: int) -> Logprobs:
    """Takes the log-probs of `ids`, int64 [m], and of the `num_top` likeliest, from log-probs [m, vocab]."""
    # Which of several equal ids are the last must not depend on how many another row wants.
    num_found = min(max(num_top, _MOST_TOP), distribution.shape[1]) if num_top else 0
    top, top_ids = find_likeliest(distribution, num_found)
    return Logprobs(distribution.gather(1, ids[:, None])[:, 0], top_ids[:, :num_top], top[:, :num_top])


def add_ranks(distribution: Tensor, ids: Tensor, logprobs: Logprobs) -> Logprobs:
    """Adds the ranks of `ids` [m] in log-probs [m, vocab], ties by lowest id, as among the likeliest ids."""
    chosen, places = logprobs.chosen[:, None], torch.arange(distribution.shape[1], device=ids.device)
    ahead = (distribution > chosen) | ((distribution == chosen) & (places < ids[:, None]))
    return replace(logprobs, ranks=ahead.sum(-1, dtype=torch.int32) + 1)


def concatenate(parts: list[Logprobs]) -> Logprobs:
    """Concatenates at least one, all with the same number of likeliest ids, all with or without ranks."""
    if len(parts) == 1:
        return parts[0]
    names = ("chosen", "top_ids", "top") if parts[0].ranks is None else ("chosen", "top_ids", "top", "ranks")
    return Logprobs(*(torch.cat([getattr(part, name) for part in parts]) for name in names))
