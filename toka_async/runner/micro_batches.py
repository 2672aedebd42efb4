"""Cuts a step into micro-batches, so that every stage of a pipeline computes one while the others compute theirs.

Every micro-batch has its share of the decoding rows and of the chunks' tokens, each in order. So rows reach a stage at
about the same time in every step, and a chunk's first part is computed before its next one. All ranks cut alike. Knows
rows and groups; knows no stages and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toka_async.arrays import Int32, Int64
from toka_async.attention.base import PrefixGroup
from toka_async.runner.inputs import StepRows

LEAST_TOKENS = (
    128  # of the chunks' tokens in one micro-batch: with fewer, reading the weights takes longer than they do
)


@dataclass(slots=True, frozen=True)
class MicroBatch:
    """A part of a step.

    rows: of the part alone, with `firsts` counted from its own first token. first_row: place of its first decoding row
    in the step. groups: of its rows. places: int64 [s], of its samples among the step's; None: it has all.
    """

    rows: StepRows
    first_row: int = 0
    groups: tuple[PrefixGroup, ...] = ()
    places: Int64 | None = None


def count_most_rows(max_seqs: int, num_parts: int) -> int:
    """Counts the decoding rows that a micro-batch can have."""
    return -(-max_seqs // num_parts)


def count_most_tokens(max_seqs: int, max_tokens: int, num_parts: int, least_tokens: int = LEAST_TOKENS) -> int:
    """Counts the tokens that a micro-batch can have."""
    of_chunks = max(least_tokens, -(-max_tokens // num_parts))
    return min(max_tokens, count_most_rows(max_seqs, num_parts) + of_chunks)


class Cutter:
    """Cuts steps into at most `num_parts` micro-batches. least_tokens: of chunks in each, as far as there are any."""

    def __init__(self, num_parts: int = 1, least_tokens: int = LEAST_TOKENS) -> None:
        self._num_parts = num_parts
        self._least_tokens = least_tokens
        # The decoding rows of the last cut: callers compare arrays by identity to see that rows are the same.
        self._cut: tuple[Int32, int, list[Int32]] | None = None

    def cut(self, rows: StepRows, groups: Sequence[PrefixGroup]) -> list[MicroBatch]:
        """Cuts a step into parts, in the order in which they are to be computed; a step without rows has none."""
        if not rows.slots.size:
            return []
        if self._num_parts == 1:
            return [MicroBatch(rows, groups=tuple(groups))]
        num_decode, num_tokens = rows.num_decode, int(rows.lengths[rows.num_decode :].sum())
        num_chunks = min(self._num_parts, -(-num_tokens // self._least_tokens))
        num_parts = max(min(self._num_parts, num_decode), num_chunks)
        row_ends = _find_ends(num_decode, num_parts)
        token_ends = [*_find_ends(num_tokens, num_chunks), *[num_tokens] * (num_parts - num_chunks)]
        slots = self._cut_decode_slots(rows, row_ends)
        parts, first_row, first_token = [], 0, 0
        for part, (row_end, token_end) in enumerate(zip(row_ends, token_ends, strict=True)):
            parts.append(_make_part(rows, groups, slots[part], first_row, row_end, first_token, token_end))
            first_row, first_token = row_end, token_end
        return parts

    def _cut_decode_slots(self, rows: StepRows, ends: list[int]) -> list[Int32]:
        """Cuts the decoding rows' slots. Returns the same arrays while the step's slots are the same array."""
        if self._cut is None or self._cut[0] is not rows.slots or self._cut[1] != len(ends):
            parts = [rows.slots[first:end] for first, end in zip([0, *ends], ends, strict=False)]
            self._cut = rows.slots, len(ends), parts
        return self._cut[2]


def _find_ends(total: int, num_parts: int) -> list[int]:
    """Finds where equal parts of `total` end."""
    return [total * (part + 1) // num_parts for part in range(num_parts)]


def _make_part(
    rows: StepRows,
    groups: Sequence[PrefixGroup],
    slots: Int32,
    first_row: int,
    row_end: int,
    first_token: int,
    token_end: int,
) -> MicroBatch:
    """Makes a part of some decoding rows and some of the chunks' tokens, which count from the first chunk's first."""
    num_decode = row_end - first_row
    decode, places = slice(first_row, row_end), np.arange(first_row, row_end)
    contexts, lengths, samples = rows.contexts[decode], rows.lengths[decode], rows.samples[decode]
    if first_token < token_end:
        chunks = slice(rows.num_decode, None)
        length, sample = rows.lengths[chunks], rows.samples[chunks]
        starts = np.cumsum(length) - length
        low = np.clip(first_token - starts, 0, length)
        high = np.clip(token_end - starts, 0, length)
        held = np.flatnonzero(high > low)
        is_last = (high == length)[held]
        nth = rows.num_decode + np.cumsum(sample) - 1  # among the step's samples
        places = np.concatenate([places, nth[held][sample[held] & is_last]])
        slots = np.concatenate([slots, rows.slots[chunks][held]])
        contexts = np.concatenate([contexts, (rows.contexts[chunks] - length + high)[held]])
        lengths = np.concatenate([lengths, (high - low)[held].astype(np.int32)])
        samples = np.concatenate([samples, sample[held] & is_last])
    firsts = np.cumsum(lengths, dtype=np.int64) - lengths
    part = StepRows(num_decode, slots, lengths, contexts, firsts, samples, rows.saves)
    return MicroBatch(part, first_row, _clip_groups(groups, first_row, row_end), places)


def _clip_groups(groups: Sequence[PrefixGroup], first_row: int, row_end: int) -> tuple[PrefixGroup, ...]:
    """Clips the groups to some rows, and counts them from the first of these. A row alone is no group."""
    cut = []
    for group in groups:
        first, end = max(group.first_row, first_row), min(group.first_row + group.num_rows, row_end)
        if end - first > 1:
            cut.append(PrefixGroup(first - first_row, end - first, group.num_pages))
    return tuple(cut)
