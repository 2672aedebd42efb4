"""Edits logits in place: bias, end tokens that are held back, penalties that count the output's tokens.

An id's new value is computed once, in float32, and rounded once, to the logits' dtype. The other kernels then read the
row as if it came so from the model. The order is that of `model.sampling`: bias, -inf for held ids, repetition,
presence, frequency.

Counts need no state between steps. A program owns a zeroed line of `vocab` counts, adds the row's output to it, and
takes each id's count out again: who gets more than 0 edits the id, once. So a row may come and go, fork, and share
pages at any time.

A row that also penalises repetition leaves ids that are in its prompt alone to the kernels that read the logits. Its
seen bits are cleared for ids of the output, whose values are edited here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power
from toka_async.kernels.sampling.kernels import RowTable, SamplingKernels
from toka_async.kernels.sampling.raw import find_likeliest, restore
from toka_async.kernels.sampling.row import (
    BIASED,
    COUNTED,
    INF,
    MIN_TOKENS,
    RAW,
    REPETITION,
    clean,
    penalise,
    read_output,
)

LIST_WIDTH = 320  # biased ids and end tokens of a row
NUM_TOP = 20  # likeliest tokens of a row

_AT_ONCE = tl.constexpr(64)  # rows whose flags a program reads together
_EDITED = tl.constexpr(BIASED.value | MIN_TOKENS.value | COUNTED.value)
_PROGRAMS = 128
_BLOCK = 1024
_PART_LINES = 64


@dataclass(slots=True, frozen=True)
class EditTable:
    """Parameters of edits by slot, beside those of `RowTable`; on the device, all contiguous.

    presence, frequency: float32 [num_slots]. min_tokens, num_bias, num_ends, num_top: int32 [num_slots]. ids, values:
    int32 and float32 [num_slots, LIST_WIDTH]: the distinct ids that are biased, with what is added; then the end
    tokens.
    """

    presence: Tensor
    frequency: Tensor
    min_tokens: Tensor
    num_bias: Tensor
    num_ends: Tensor
    num_top: Tensor
    ids: Tensor
    values: Tensor


@dataclass(slots=True, frozen=True)
class RowTokens:
    """The tokens of rows. page_table: int32 [num_slots, pages]; history: int32 [num_pages, page_size]."""

    page_table: Tensor
    history: Tensor


class EditKernels:
    """Edits the logits of up to `max_rows` rows before a draw, and computes what log-probs need of them.

    A float32 row's tokens and likeliest tokens are those of `model.sampling`, `model.penalties` and `model.logprobs`.
    Values of other dtypes are rounded to the dtype after the bias and the penalties together, but before a repetition
    penalty that the draw applies. Owns 4 bytes for each id of the vocabulary and each of 128 programs, and 4 for each
    token of the cache. Nothing waits for the host: a CUDA graph can capture all calls.

    Log-probs of edited tokens are exact while the outputs of rows that are edited and want log-probs are no more
    tokens than the cache holds. Only rows that share pages of their outputs can exceed that.

    Args:
        kernels: what draws; its workspace is used between draws.
        num_cells: tokens in the cache.
    """

    def __init__(self, kernels: SamplingKernels, num_cells: int, device: torch.device) -> None:
        self._vocab = kernels.vocab_size
        self._workspace = kernels.maxima, kernels.picks
        assert kernels.picks.shape[1] >= NUM_TOP
        max_rows = kernels.max_rows
        self._num_programs = min(_PROGRAMS, max_rows)
        self._room = num_cells + max_rows * LIST_WIDTH
        self._counts = torch.zeros(self._num_programs, self._vocab, dtype=torch.int32, device=device)
        self._saved = torch.zeros(self._room, dtype=torch.float32, device=device)
        self._first_saved = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._num_saved = torch.zeros(1, dtype=torch.int32, device=device)
        self._sums = torch.zeros(max_rows, 2, dtype=torch.float32, device=device)

    def edit(
        self,
        logits: Tensor,
        slots: Tensor,
        contexts: Tensor,
        table: RowTable,
        edits: EditTable,
        tokens: RowTokens,
        masks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Edits logits [s, vocab] in place, as the slots' flags ask for; `restore` must follow, after the draw.

        The arguments are those of `SamplingKernels.draw`. Slots that are edited are distinct. Clears the bits in
        `table.seen` of ids whose repetition penalty is applied here.

        masks: those of `SamplingKernels.draw_measured`, which forbids ids after all edits. They change no logits, but
            the likeliest tokens after edits are found by them.

        Returns:
            The likeliest token ids, int32 [s, NUM_TOP], and their log-probs, float32 [s, NUM_TOP]: as many of each row
            as `edits.num_top` says, raw ones for rows flagged RAW, and those after edits for rows flagged TOP.
        """
        num_rows = len(slots)
        top_ids = torch.empty(num_rows, NUM_TOP, dtype=torch.int32, device=logits.device)
        top_values = torch.empty(num_rows, NUM_TOP, dtype=torch.float32, device=logits.device)
        if not num_rows:
            return top_ids, top_values
        shape = self._shape(logits)
        self._find_likeliest(logits, slots, table, edits, None, (top_ids, top_values), edited=False)
        edit[(min(self._num_programs, num_rows),)](
            logits,
            slots,
            contexts,
            table.flags,
            table.repetition,
            table.num_prompt,
            table.seen,
            edits.presence,
            edits.frequency,
            edits.min_tokens,
            edits.num_bias,
            edits.num_ends,
            edits.ids,
            edits.values,
            tokens.page_table,
            tokens.history,
            self._counts,
            self._saved,
            self._first_saved,
            self._num_saved,
            num_rows,
            tokens.page_table.stride(0),
            self._room,
            vocab=self._vocab,
            seen_stride=table.seen.stride(0),
            page_size=tokens.history.shape[1],
            width=LIST_WIDTH,
            block=_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,  # rounds as plain torch does
            **shape,
        )
        self._find_likeliest(logits, slots, table, edits, masks, (top_ids, top_values), edited=True)
        return top_ids, top_values

    def _find_likeliest(
        self,
        logits: Tensor,
        slots: Tensor,
        table: RowTable,
        edits: EditTable,
        masks: Tensor | None,
        output: tuple[Tensor, Tensor],
        *,
        edited: bool,
    ) -> None:
        """Finds the likeliest tokens of rows that ask for them before the logits are edited, or after it."""
        maxima, picks = self._workspace
        num_lines = maxima.shape[1]
        part_lines = min(_PART_LINES, round_to_power(num_lines))
        find_likeliest[(len(slots),)](
            logits,
            slots,
            table.flags,
            table.temperature,
            table.repetition,
            table.seen,
            masks,
            edits.num_top,
            maxima,
            picks,
            self._sums,
            *output,
            edited=edited,
            vocab=self._vocab,
            seen_stride=table.seen.stride(0),
            num_lines=num_lines,
            padded_lines=round_to_power(num_lines),
            part_lines=part_lines,
            num_parts=divide_up(num_lines, part_lines),
            picks_stride=picks.stride(0),
            num_top=NUM_TOP,
            padded_top=round_to_power(NUM_TOP),
            num_warps=8,
            **self._shape(logits),
        )

    def restore(
        self,
        logits: Tensor,
        slots: Tensor,
        contexts: Tensor,
        table: RowTable,
        edits: EditTable,
        tokens: RowTokens,
        drawn: tuple[Tensor, Tensor],
        masks: Tensor | None = None,
    ) -> None:
        """Corrects the log-probs that were drawn from edited logits.

        drawn: what `SamplingKernels.draw` returned. masks: those that it drew by.
        """
        if not len(slots):
            return
        restore[(len(slots),)](
            logits,
            slots,
            contexts,
            table.flags,
            masks,
            table.num_prompt,
            edits.num_bias,
            edits.ids,
            tokens.page_table,
            tokens.history,
            self._saved,
            self._first_saved,
            self._num_saved,
            self._sums,
            *drawn,
            tokens.page_table.stride(0),
            num_words=table.seen.stride(0),
            page_size=tokens.history.shape[1],
            width=LIST_WIDTH,
            block=_BLOCK,
            num_warps=4,
            **self._shape(logits),
        )

    def _shape(self, logits: Tensor) -> dict[str, Any]:
        return {"stride": logits.stride(0), "largest": torch.finfo(logits.dtype).max}


@launch_quickly
@triton.jit(
    do_not_specialize=["num_rows", "table_stride", "room"],
    do_not_specialize_on_alignment=["slots_at", "contexts_at"],
)
def edit(
    logits_at,
    slots_at,
    contexts_at,
    flags_at,
    repetition_at,
    num_prompt_at,
    seen_at,
    presence_at,
    frequency_at,
    min_tokens_at,
    num_bias_at,
    num_ends_at,
    listed_ids_at,
    listed_values_at,
    page_table_at,
    history_at,
    counts_at,
    saved_at,
    first_saved_at,
    num_saved_at,
    num_rows,
    table_stride,
    room,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    seen_stride: tl.constexpr,
    page_size: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    largest: tl.constexpr,
):
    """One of n programs edits every n-th row, as far as the flags ask for it.

    counts: int32 [n, vocab], zeros before and after. saved: float32 [room], logits before edits, for rows
    flagged RAW: of the output's tokens, then of the biased ids. first_saved: int32 [row], where these begin; -1 where
    there was no room. num_saved: int32 [1], 0 before.
    """
    num_programs = tl.num_programs(0)
    nth = tl.arange(0, _AT_ONCE)
    counts_at += tl.program_id(0).to(tl.int64) * vocab
    first = tl.program_id(0)
    while first < num_rows:
        rows = first + nth * num_programs
        slots = tl.load(slots_at + rows, mask=rows < num_rows, other=0)
        flags = tl.load(flags_at + slots, mask=rows < num_rows, other=0)
        places = tl.where((flags & _EDITED) != 0, nth, _AT_ONCE)
        place = tl.min(places, 0)
        while place < _AT_ONCE:
            row = (first + place * num_programs).to(tl.int64)
            slot = tl.load(slots_at + row)
            _edit_row(
                row,
                logits_at + row * stride,
                tl.load(contexts_at + row),
                tl.load(flags_at + slot),
                tl.load(repetition_at + slot),
                tl.load(num_prompt_at + slot),
                seen_at + slot * seen_stride,
                tl.load(presence_at + slot),
                tl.load(frequency_at + slot),
                tl.load(min_tokens_at + slot),
                tl.load(num_bias_at + slot),
                tl.load(num_ends_at + slot),
                listed_ids_at + slot * width,
                listed_values_at + slot * width,
                page_table_at + slot * table_stride,
                history_at,
                counts_at,
                saved_at,
                first_saved_at,
                num_saved_at,
                room,
                page_size,
                block,
                largest,
            )
            place = tl.min(tl.where(places > place, places, _AT_ONCE), 0)
        first += _AT_ONCE * num_programs


@triton.jit
def _edit_row(
    row,
    logits_at,
    context,
    flags,
    repetition,
    num_prompt,
    seen_at,
    presence,
    frequency,
    min_tokens,
    num_bias,
    num_ends,
    listed_ids_at,
    listed_values_at,
    page_table_at,
    history_at,
    counts_at,
    saved_at,
    first_saved_at,
    num_saved_at,
    room,
    page_size: tl.constexpr,
    block: tl.constexpr,
    largest: tl.constexpr,
):
    counted = (flags & COUNTED) != 0
    penalised = (flags & REPETITION) != 0
    num_output = tl.where(counted, context - num_prompt, 0)
    first_saved = tl.full((), -1, tl.int32)
    if (flags & RAW) != 0:
        first_saved = tl.atomic_add(num_saved_at, num_output + num_bias)
        first_saved = tl.where(first_saved + num_output + num_bias <= room, first_saved, -1)
        tl.store(first_saved_at + row, first_saved)
    start = tl.zeros((), tl.int32)
    while start < num_output:
        place = start + tl.arange(0, block)
        within = place < num_output
        ids = read_output(page_table_at, history_at, num_prompt + place, within, page_size)
        tl.atomic_add(counts_at + ids, 1, mask=within, sem="relaxed")
        if first_saved >= 0:
            x = clean(tl.load(logits_at + ids, mask=within, other=0.0).to(tl.float32), largest)
            tl.store(saved_at + first_saved + place, x, mask=within)
        start += block
    tl.debug_barrier()  # all are counted, and all logits are saved
    start = tl.zeros((), tl.int32)
    while start < num_bias:
        place = start + tl.arange(0, block)
        within = place < num_bias
        ids = tl.load(listed_ids_at + place, mask=within, other=0)
        x = clean(tl.load(logits_at + ids, mask=within, other=0.0).to(tl.float32), largest)
        if first_saved >= 0:
            tl.store(saved_at + first_saved + num_output + place, x, mask=within)
        x += tl.load(listed_values_at + place, mask=within, other=0.0)
        if counted:
            count = tl.atomic_xchg(counts_at + ids, tl.zeros((block,), tl.int32), mask=within, sem="relaxed")
            found = within & (count > 0)
            x = tl.where(found, _penalise(x, count, penalised, repetition, presence, frequency), x)
            if penalised:
                _clear_seen(seen_at, ids, found)
        tl.store(logits_at + ids, x.to(logits_at.dtype.element_ty), mask=within)
        start += block
    tl.debug_barrier()  # the counts of biased ids are taken
    start = tl.zeros((), tl.int32)
    while start < num_output:
        place = start + tl.arange(0, block)
        within = place < num_output
        ids = read_output(page_table_at, history_at, num_prompt + place, within, page_size)
        count = tl.atomic_xchg(counts_at + ids, tl.zeros((block,), tl.int32), mask=within, sem="relaxed")
        found = within & (count > 0)
        x = clean(tl.load(logits_at + ids, mask=found, other=0.0).to(tl.float32), largest)
        x = _penalise(x, count, penalised, repetition, presence, frequency)
        tl.store(logits_at + ids, x.to(logits_at.dtype.element_ty), mask=found)
        if penalised:
            _clear_seen(seen_at, ids, found)
        start += block
    tl.debug_barrier()  # the counts are zeros again, and no value follows that of a held id
    if ((flags & MIN_TOKENS) != 0) & (context - num_prompt < min_tokens):
        start = tl.zeros((), tl.int32)
        while start < num_ends:
            place = start + tl.arange(0, block)
            ids = tl.load(listed_ids_at + num_bias + place, mask=place < num_ends, other=0)
            nothing = tl.full((block,), -INF, tl.float32)
            tl.store(logits_at + ids, nothing.to(logits_at.dtype.element_ty), mask=place < num_ends)
            start += block


@triton.jit
def _penalise(x, count, penalised, repetition, presence, frequency):
    """Returns the logits [n] of ids that are `count` times in the output."""
    if penalised:
        x = penalise(x, 1, repetition)
    return x - presence - count.to(tl.float32) * frequency


@triton.jit
def _clear_seen(seen_at, ids, found):
    ones = tl.full(ids.shape, 1, tl.int32)
    tl.atomic_and(seen_at + ids // 32, ~(ones << (ids & 31)), mask=found, sem="relaxed")
