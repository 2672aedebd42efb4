"""Log-probabilities of the raw distribution: before temperature, penalties, bias and filters.

Knows no requests and no rows beyond the tensors it is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toka_async.model.sampling import likeliest


@dataclass(slots=True, frozen=True)
class Logprobs:
    """chosen: float32 [m]; top_ids: int64 [m, k]; top: float32 [m, k], likeliest first, ties by lowest id."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def distribution(logits: Tensor) -> Tensor:
    """log_softmax in float32, [m, vocab]; -inf becomes the smallest finite number, so that every value is finite."""
    smallest = torch.finfo(torch.float32).min
    return logits.float().log_softmax(-1).nan_to_num_(nan=smallest, neginf=smallest)


def logprobs_of(distribution: Tensor, ids: Tensor, num_top: int) -> Logprobs:
    """Of the given ids, int64 [m], and of the `num_top` likeliest, from log-probs [m, vocab]."""
    top, top_ids = likeliest(distribution, min(num_top, distribution.shape[1]))
    return Logprobs(distribution.gather(1, ids[:, None])[:, 0], top_ids, top)


def concatenate(parts: list[Logprobs]) -> Logprobs:
    """One after the other; at least one, all with the same number of likeliest ids."""
    if len(parts) == 1:
        return parts[0]
    return Logprobs(*(torch.cat([getattr(part, name) for part in parts]) for name in ("chosen", "top_ids", "top")))
