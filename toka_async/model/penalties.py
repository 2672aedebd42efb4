"""Changes float32 logits in place before a draw: allowed tokens, bias, forbidden tokens, and penalties.

Knows no requests, no slots and no random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Penalties:
    """Penalties of p rows.

    tokens: int64 [p, w]: each row's prompt and generated ids so far, padded at the end with any valid ids. lengths:
    int64 [p]: ids in the row, at least 1. num_prompt: int64 [p]: leading ids that are the prompt. presence, frequency,
    repetition: float32 [p]; 0, 0 and 1 are off.
    """

    tokens: Tensor
    lengths: Tensor
    num_prompt: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor


def keep_only(logits: Tensor, rows: Tensor, at: Tensor, ids: Tensor) -> None:
    """Sets `rows` [r] of logits [s, vocab] to -inf except at (at, ids), which are in these rows; all int64."""
    kept = logits[at, ids]
    logits.index_fill_(0, rows, -torch.inf)
    logits[at, ids] = kept


def apply_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Sets `rows` [r], int64, of logits [s, vocab] to -inf where masks have no bit.

    masks: int32 [r, ceil(vocab / 32)]: a bit for each id, lowest first.
    """
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = ((masks[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]] != 0
    logits[rows] = logits[rows].masked_fill_(~allowed, -torch.inf)


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Adds `values` [b] (-inf allowed) at (rows, ids) of logits [s, vocab]; rows, ids int64 [b]."""
    logits.index_put_((rows, ids), values, accumulate=True)


def apply_repetition(logits: Tensor, penalties: Penalties) -> None:
    """Divides positive and multiplies negative logits [p, vocab] of ids in prompt or output (arXiv:1909.05858)."""
    inside = _inside(penalties)
    # The padding becomes the row's first id, which is written repeatedly with the same value.
    ids = torch.where(inside, penalties.tokens, penalties.tokens[:, :1])
    scores = logits.gather(1, ids)
    factor = penalties.repetition[:, None]
    logits.scatter_(1, ids, torch.where(scores < 0, scores * factor, scores / factor))


def subtract_counts(logits: Tensor, penalties: Penalties) -> None:
    """Subtracts frequency times the count, and presence once, for the output's ids from logits [p, vocab]."""
    places = torch.arange(penalties.tokens.shape[1], device=logits.device)
    generated = _inside(penalties) & (places >= penalties.num_prompt[:, None])
    counts = torch.zeros_like(logits).scatter_add_(1, penalties.tokens, generated.to(logits.dtype))
    logits -= (counts > 0) * penalties.presence[:, None]
    logits -= counts.mul_(penalties.frequency[:, None])


def _inside(penalties: Penalties) -> Tensor:
    places = torch.arange(penalties.tokens.shape[1], device=penalties.tokens.device)
    return places < penalties.lengths[:, None]
