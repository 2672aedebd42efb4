"""Samples with plain torch, on any device and with every parameter: all rows on a CPU, rare rows elsewhere.

Works in slabs of rows, so that only a bounded part of rows x vocabulary is in memory at once. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32, Int64
from toka_async.model.logprobs import Logprobs, concatenate, distribution, select_logprobs
from toka_async.model.rng import Float64, draw_uniforms
from toka_async.model.sampling import EDITS, Flag, Params, clean, sample
from toka_async.runner.copies import upload
from toka_async.runner.logits_processors import edit
from toka_async.runner.rows import RowTables
from toka_async.runner.samples import NO_ROWS, Draws, make_draws
from toka_async.runner.token_history import TokenHistory

# Float32 logits of one slab; sorting a whole vocabulary takes more than ten times as much.
SLAB_BYTES = {"cpu": 32 << 20, "cuda": 1 << 28}

Head = Callable[[Tensor], Tensor]
SlabDraw = Callable[[Tensor, Params, Float64], Tensor]  # as `model.sampling.sample`


def cut_slabs(num_rows: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    """Cuts `num_rows` rows into parts whose logits fit into a slab."""
    size = max(1, SLAB_BYTES[device.type] // (4 * vocab_size))
    return (slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size))


@dataclass(slots=True, frozen=True)
class SampledRows:
    """The rows of one call, on the host, [s] each. needed: the flags of all rows together."""

    slots: Int32
    lengths: Int64
    params: Params
    uniform: Float64
    needed: int


class SlabSampler:
    """Implements `Sampler` with the vocabulary's head, over the tables of `rows` and `history`."""

    def __init__(self, head: Head, rows: RowTables, history: TokenHistory, draw: SlabDraw = sample) -> None:
        self._head = head
        self._draw = draw
        self._rows = rows
        self._history = history

    def sample(self, hidden: Tensor, slots: Int32, lengths: Int64, slots_at: Tensor, lengths_at: Tensor) -> Draws:  # noqa: ARG002
        """See `Sampler`; the columns on the device are not needed."""
        table = self._rows
        params = table.params[slots]
        needed = int(np.bitwise_or.reduce(params["flags"]))
        # Draw i of a row's stream is for its output token i, even when that is computed again.
        uniform = draw_uniforms(table.seeds[slots], lengths - table.num_prompt[slots]) if needed & Flag.RANDOM else None
        rows = SampledRows(slots, lengths, params, np.zeros(slots.size) if uniform is None else uniform, needed)
        parts = cut_slabs(slots.size, table.vocab_size, hidden.device)
        tokens, logprobs = zip(*(self._sample_slab(hidden, rows, part) for part in parts), strict=True)
        asked = np.flatnonzero(params["flags"] & Flag.LOGPROBS) if needed & Flag.LOGPROBS else NO_ROWS
        values = [part for part in logprobs if part is not None]
        token_ids = torch.cat(tokens) if len(tokens) > 1 else tokens[0]
        return make_draws(token_ids, asked, params["num_logprobs"][asked], concatenate(values) if values else None)

    def _sample_slab(self, hidden: Tensor, rows: SampledRows, part: slice) -> tuple[Tensor, Logprobs | None]:
        """Samples some rows. Returns token ids int64, and the log-probs of those rows that ask."""
        logits = clean(self._head(hidden if part == slice(0, rows.slots.size) else hidden[part]))
        params = rows.params[part]
        asked = np.flatnonzero(params["flags"] & Flag.LOGPROBS) if rows.needed & Flag.LOGPROBS else NO_ROWS
        (asked_at,) = upload((asked,), logits.device)
        raw = distribution(logits[asked_at]) if asked.size else None  # before any edit
        if rows.needed & EDITS:
            logits = logits.float()
            edit(logits, self._rows, self._history, rows.slots[part], rows.lengths[part])
        tokens = self._draw(logits, params, rows.uniform[part])
        if raw is None:
            return tokens, None
        return tokens, select_logprobs(raw, tokens[asked_at], int(rows.params["num_logprobs"].max()))
