"""Decides how the rows of a draw are sampled, on the host: from columns by slot that only admissions change.

`min_tokens` is the one need that ends while a row runs. Nobody counts it down: a decision names the row whose need ends
last, and holds until that row is long enough. Knows slots and sampling parameters; knows no logits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from toka_async.arrays import Bool, Int32, Int64
from toka_async.model.sampling import Flag
from toka_async.runner.rows import RowTables
from toka_async.runner.samples import NO_ROWS

_KNOWN = 64  # decisions that are remembered: as many as a step has micro-batches at most
_TORCH, _FULL, _HELD, _LOGPROBS, _TOP, _KEPT = 1, 2, 4, 8, 16, 32
_EDITED = Flag.MASKED | Flag.BIASED | Flag.COUNTED


class Route(StrEnum):
    """How the rows of a step are sampled."""

    PLAIN = "plain"  # by the kernels that only read logits
    FULL = "full"  # by kernels that also edit logits, find likeliest tokens and measure filters
    TORCH = "torch"  # some of them in plain torch


@dataclass(slots=True, frozen=True)
class TopRows:
    """The rows for which kernels find likeliest tokens: int64 [m], with their counts, int32 [m]."""

    rows: Int64
    counts: Int32


@dataclass(slots=True, frozen=True)
class SamplingNeeds:
    """What the rows of one draw need.

    full: kernels edit logits, find likeliest tokens or measure filters. by_torch: int64, the rows that plain torch
    samples. wants_logprobs: any row does. wants_kept: kernels measure filters. top: None if kernels find no likeliest
    tokens.
    """

    full: bool
    by_torch: Int64
    wants_logprobs: bool
    wants_kept: bool
    top: TopRows | None

    @property
    def route(self) -> Route:
        if self.by_torch.size:
            return Route.TORCH
        return Route.FULL if self.full else Route.PLAIN


@dataclass(slots=True, frozen=True)
class _Known:
    """A decision for an array of slots. watched: the slot whose min_tokens ends it; -1: it holds."""

    slots: Int32
    needs: SamplingNeeds
    watched: int


class SamplingRoutes:
    """Columns over slots: bits of needs; the length from which on no end token is held; how many likeliest tokens."""

    def __init__(self, rows: RowTables) -> None:
        self._rows = rows
        max_seqs = rows.params.size
        self._bits = np.zeros(max_seqs, dtype=np.uint8)
        self._held_until = np.zeros(max_seqs, dtype=np.int64)
        self._num_top = np.zeros(max_seqs, dtype=np.int32)
        self._known: deque[_Known] = deque(maxlen=_KNOWN)  # the newest last

    def admit(self, slots: Int32, by_torch: Bool) -> None:
        """Takes new rows. by_torch: which of them kernels cannot sample."""
        rows, params = self._rows, self._rows.params[slots]
        flags, num_top = params["flags"], np.minimum(params["num_logprobs"], rows.vocab_size)
        has_top = ~by_torch & (num_top > 0)
        held = ~by_torch & ((flags & Flag.MIN_TOKENS) != 0)
        logprobs = (flags & Flag.LOGPROBS) != 0
        kept = ~by_torch & ((flags & Flag.KEPT) != 0)
        # Both routes compute log-probs, rounded differently: a row's route must not depend on what others need.
        full = has_top | kept | (~by_torch & ((flags & _EDITED) != 0)) | (held & logprobs)
        bits = _TORCH * by_torch + _FULL * full + _HELD * held + _LOGPROBS * logprobs + _TOP * has_top + _KEPT * kept
        self._bits[slots] = bits
        self._held_until[slots] = np.where(held, rows.num_prompt[slots] + params["min_tokens"], 0)
        self._num_top[slots] = np.where(has_top, num_top, 0)

    def find(self, slots: Int32, lengths: Int64) -> SamplingNeeds:
        """Finds the needs of rows with `lengths` tokens so far. int32 [s] and int64 [s]."""
        bits = self._bits[slots]
        needed = int(np.bitwise_or.reduce(bits))
        full = bool(needed & _FULL)
        if needed & _HELD and not full:
            full = bool((lengths < self._held_until[slots]).any())
        return SamplingNeeds(
            full=full,
            by_torch=np.flatnonzero(bits & _TORCH) if needed & _TORCH else NO_ROWS,
            wants_logprobs=bool(needed & _LOGPROBS),
            wants_kept=bool(needed & _KEPT),
            top=self._find_top(slots) if needed & _TOP else None,
        )

    def find_decoding(self, slots: Int32) -> SamplingNeeds:
        """Finds the needs of rows of which the next token is decoded. Remembered by array of slots."""
        for place, known in enumerate(self._known):
            if known.slots is slots:
                if known.watched < 0 or self._rows.positions[known.watched] + 1 < self._held_until[known.watched]:
                    return known.needs
                del self._known[place]
                break
        lengths = self._rows.positions[slots] + 1
        needs, watched = self.find(slots, lengths), -1
        if needs.full and not np.bitwise_or.reduce(self._bits[slots]) & _FULL:
            watched = int(slots[np.argmax(self._held_until[slots] - lengths)])
        self._known.append(_Known(slots, needs, watched))
        return needs

    def _find_top(self, slots: Int32) -> TopRows:
        rows = np.flatnonzero(self._num_top[slots])
        return TopRows(rows, self._num_top[slots[rows]])
