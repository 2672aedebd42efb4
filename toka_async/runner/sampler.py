"""Samples the rows of a step from their hidden states, and takes the log-probs that rows ask for.

Works in slabs of rows, so that a bounded part of rows x vocabulary is in memory at once. Knows slots and sampling;
knows no requests and no attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32, Int64
from toka_async.model.logprobs import Logprobs, concatenate, distribution, logprobs_of
from toka_async.model.sampling import EDITS, Flag, Params, clean, sample
from toka_async.model.streams import Float64, uniforms
from toka_async.runner.copies import upload
from toka_async.runner.edits import edit
from toka_async.runner.history import History
from toka_async.runner.rows import Rows

# Float32 logits of one slab; sampling needs a few times as much.
SLAB_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}

Head = Callable[[Tensor], Tensor]


def slabs(num_rows: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    """Parts of `num_rows` rows whose logits fit."""
    size = max(1, SLAB_BYTES[device.type] // (4 * vocab_size))
    return (slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size))


@dataclass(slots=True, frozen=True)
class Samples:
    """One draw for each of s rows.

    token_ids: int64 [s] on the device. asked: int64 [m] on the host, which rows want log-probs; num_top: int32 [m] on
    the host, of how many likeliest ids. logprobs: of the asked, on the device; None when m is 0.
    """

    token_ids: Tensor
    asked: Int64
    num_top: Int32
    logprobs: Logprobs | None


class Sampler:
    """Samples with the vocabulary's head, over the tables of `rows` and `history`."""

    def __init__(self, head: Head, rows: Rows, history: History) -> None:
        self._head = head
        self._rows = rows
        self._history = history

    def sample(self, hidden: Tensor, slots: Int32, lengths: Int64) -> Samples:
        """Draw one token for each row.

        Args:
            hidden: [s, hidden], s >= 1, the rows' last positions.
            slots: int32 [s].
            lengths: int64 [s], tokens of the row so far.
        """
        params = self._rows.params[slots]
        uniform = self._uniforms(params, slots, lengths)
        asked = np.flatnonzero(params["num_logprobs"] >= 0)
        num_top = params["num_logprobs"][asked]
        most = int(num_top.max(initial=0))
        tokens: list[Tensor] = []
        logprobs: list[Logprobs] = []
        for part in slabs(slots.size, self._rows.vocab_size, hidden.device):
            logits = clean(self._head(hidden[part]))
            raw = _raw(logits, params[part])
            tokens.append(self._draw(logits, params[part], slots[part], lengths[part], uniform[part]))
            if raw is not None:
                at, values = raw
                logprobs.append(logprobs_of(values, tokens[-1][at], most))
        token_ids = torch.cat(tokens) if len(tokens) > 1 else tokens[0]
        return Samples(token_ids, asked, num_top, concatenate(logprobs) if logprobs else None)

    def _uniforms(self, params: Params, slots: Int32, lengths: Int64) -> Float64:
        """Draw i of a row's stream is for its output token i, whatever was computed twice."""
        if not (params["flags"] & Flag.RANDOM).any():
            return np.zeros(slots.size)
        return uniforms(self._rows.seeds[slots], lengths - self._rows.num_prompt[slots])

    def _draw(self, logits: Tensor, params: Params, slots: Int32, lengths: Int64, uniform: Float64) -> Tensor:
        """Token ids int64 of one slab; its logits may be overwritten."""
        if (params["flags"] & EDITS).any():
            logits = logits.float()
            edit(logits, self._rows, self._history, slots, lengths)
        return sample(logits, params, uniform)


def _raw(logits: Tensor, params: Params) -> tuple[Tensor, Tensor] | None:
    """The rows of one slab that want log-probs, int64 [m], and theirs of the whole vocabulary, before any edit."""
    asked = np.flatnonzero(params["num_logprobs"] >= 0)
    if not asked.size:
        return None
    (at,) = upload((asked,), logits.device)
    return at, distribution(logits[at])
