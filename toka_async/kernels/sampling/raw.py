"""Log-probs for rows that ask for their likeliest tokens, or for raw ones though they are edited.

`find_likeliest` passes over such rows, before or after edits. It finds the likeliest tokens in the lines of the largest
maxima, as `gather` does. `restore` computes the drawn tokens' log-probs after the draw, from the logits before edits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.sampling.candidates import pick_lines
from toka_async.kernels.sampling.row import (
    BIASED,
    COUNTED,
    INF,
    LINE,
    LOG2E,
    NO_KEY,
    RANDOM,
    RAW,
    REPETITION,
    SMALLEST,
    TOP,
    key_of,
    mask_of,
    read_lines,
    read_one,
    read_output,
    scale_of,
    weigh,
)


@launch_quickly
@triton.jit(do_not_specialize_on_alignment=["slots_at"])
def find_likeliest(
    logits_at,
    slots_at,
    flags_at,
    temperature_at,
    repetition_at,
    seen_at,
    masks_at,
    num_top_at,
    maxima_at,
    picks_at,
    sums_at,
    top_ids_at,
    top_values_at,
    edited: tl.constexpr,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    seen_stride: tl.constexpr,
    num_lines: tl.constexpr,
    padded_lines: tl.constexpr,
    part_lines: tl.constexpr,
    num_parts: tl.constexpr,
    picks_stride: tl.constexpr,
    num_top: tl.constexpr,
    padded_top: tl.constexpr,
    largest: tl.constexpr,
):
    """One program passes over a row flagged RAW, or TOP where the logits are `edited`.

    Logits before edits are taken as they are, others after the repetition penalty and at the row's temperature.
    sums: float32 [row, 2], the largest logit and the logarithm of all weights relative to it. top_ids, top_values:
    int32 and float32 [row, num_top], likeliest first, ties by lowest id, and their log-probs; as many as the row asks
    for. maxima, picks: workspace.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_at + row)
    flags = tl.load(flags_at + slot)
    if (flags & (TOP if edited else RAW)) != 0:
        penalised = (flags & REPETITION) != 0 if edited else False
        repetition = tl.load(repetition_at + slot)
        mask = mask_of(masks_at, slot, flags, seen_stride)
        seen_at += slot * seen_stride
        temperature = tl.full((), 1.0, tl.float32)
        scale = tl.full((), LOG2E, tl.float32)
        if edited:  # noqa: SIM102 - which is known when the kernel is built
            if (flags & RANDOM) != 0:
                temperature = tl.maximum(tl.load(temperature_at + slot), 1e-30)
                scale = scale_of(temperature)
        logits_at += row * stride
        maxima_at += row * num_lines
        picks_at += row * picks_stride
        tops = tl.full((part_lines,), -INF, tl.float32)
        sums = tl.zeros((part_lines,), tl.float32)
        for part in tl.range(0, num_parts, num_stages=3):
            line = part * part_lines + tl.arange(0, part_lines)
            _, x = read_lines(logits_at, seen_at, line * LINE, penalised, repetition, mask, vocab, largest)
            maxima = tl.max(x, axis=1)
            tl.store(maxima_at + line, maxima, mask=line < num_lines)
            higher = tl.maximum(tops, maxima)
            sums = sums * weigh(tops, higher, scale) + tl.sum(weigh(x, higher[:, None], scale), axis=1)
            tops = higher
        top = tl.max(tops, 0)
        total = tl.log(tl.maximum(tl.sum(sums * weigh(tops, top, scale), 0), 1e-30))
        tl.store(sums_at + row * 2, tl.maximum(top, SMALLEST))
        tl.store(sums_at + row * 2 + 1, total)
        num_asked = tl.minimum(tl.load(num_top_at + slot), vocab)
        if num_asked > 0:
            tl.debug_barrier()  # other threads read the maxima than stored them
            num_picks = tl.minimum(num_asked, num_lines)
            pick_lines(maxima_at, picks_at, num_picks, top, num_lines, padded_lines)
            pick = tl.arange(0, padded_top)
            starts = tl.load(picks_at + pick, mask=pick < num_picks, other=num_lines) * LINE
            ids, x = read_lines(logits_at, seen_at, starts, penalised, repetition, mask, vocab, largest)
            keys = tl.where(ids < vocab, key_of(x), NO_KEY)
            nth = tl.zeros((), tl.int32)
            while nth < num_asked:
                best = tl.max(keys)
                token = tl.min(tl.where(keys == best, ids, vocab))
                value = tl.max(tl.where(ids == token, x, -INF))
                tl.store(top_ids_at + row * num_top + nth, token)
                tl.store(top_values_at + row * num_top + nth, _log_prob(value, top, temperature, total))
                keys = tl.where(ids == token, NO_KEY, keys)
                nth += 1


@triton.jit
def _log_prob(x, top, temperature, total):
    return tl.maximum((x - tl.maximum(top, SMALLEST)) / temperature - total, SMALLEST)


@launch_quickly
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["slots_at", "contexts_at"])
def restore(
    logits_at,
    slots_at,
    contexts_at,
    flags_at,
    masks_at,
    num_prompt_at,
    num_bias_at,
    listed_ids_at,
    page_table_at,
    history_at,
    saved_at,
    first_saved_at,
    num_saved_at,
    sums_at,
    chosen_at,
    logprobs_at,
    table_stride,
    stride: tl.constexpr,
    num_words: tl.constexpr,
    page_size: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    largest: tl.constexpr,
):
    """One program stores the log-prob of a token drawn for a row flagged RAW.

    A held end token is not among the saved logits, since only a row without any other token draws it.
    """
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        tl.store(num_saved_at, 0)
    slot = tl.load(slots_at + row)
    flags = tl.load(flags_at + slot)
    if (flags & RAW) != 0:
        token = tl.load(chosen_at + row).to(tl.int32)
        mask = mask_of(masks_at, slot, flags, num_words)
        x = read_one(logits_at + row * stride, None, token, False, 1.0, mask, largest)
        if (flags & (BIASED | COUNTED)) != 0:
            first_saved = tl.load(first_saved_at + row)
            num_prompt = tl.load(num_prompt_at + slot)
            num_output = tl.where((flags & COUNTED) != 0, tl.load(contexts_at + row) - num_prompt, 0)
            num_saved = tl.where(first_saved >= 0, num_output + tl.load(num_bias_at + slot), 0)
            start = tl.zeros((), tl.int32)
            while start < num_saved:
                place = start + tl.arange(0, block)
                of_output = place < num_output
                table_at = page_table_at + slot * table_stride
                ids = read_output(table_at, history_at, num_prompt + place, of_output, page_size)
                of_bias = (place >= num_output) & (place < num_saved)
                listed_at = listed_ids_at + slot * width + place - num_output
                ids = tl.where(of_output, ids, tl.load(listed_at, mask=of_bias, other=0))
                found = (ids == token) & (place < num_saved)
                values = tl.load(saved_at + first_saved + place, mask=found, other=-INF)
                if tl.max(found.to(tl.int32), 0) > 0:
                    x = tl.max(values, 0)
                start += block
        logprob = _log_prob(x, tl.load(sums_at + row * 2), 1.0, tl.load(sums_at + row * 2 + 1))
        tl.store(logprobs_at + row, logprob)
