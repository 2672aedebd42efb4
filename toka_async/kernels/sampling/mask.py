"""Forbids the tokens that grammars do not allow, after all other edits of logits and before the draw."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.sampling.row import INF, MASKED

_WORD = 32  # ids of a word of a mask
_PARTS = 8  # programs of a row
_BLOCK = 128  # words that a program looks at together


def apply_masks(logits: Tensor, slots: Tensor, flags: Tensor, masks: Tensor) -> None:
    """Sets logits [s, vocab] of rows flagged MASKED to -inf where the slot's mask has no bit, in place.

    Args:
        slots: int64 [s].
        flags: int32 [num_slots].
        masks: int32 [num_slots, ceil(vocab / 32)], contiguous: a bit for each id, lowest first.
    """
    num_rows, vocab = logits.shape
    assert masks.shape[1] == triton.cdiv(vocab, _WORD)
    if num_rows:
        part = triton.cdiv(triton.cdiv(masks.shape[1], _PARTS), _BLOCK) * _BLOCK
        mask_part[(num_rows, _PARTS)](
            logits,
            slots,
            flags,
            masks,
            vocab=vocab,
            stride=logits.stride(0),
            num_words=masks.shape[1],
            part=part,
            block=_BLOCK,
            word=_WORD,
            num_warps=8,
        )


@triton.jit(do_not_specialize_on_alignment=["slots_at"])
def mask_part(
    logits_at,
    slots_at,
    flags_at,
    masks_at,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    num_words: tl.constexpr,
    part: tl.constexpr,
    block: tl.constexpr,
    word: tl.constexpr,
):
    """A program masks the ids of `part` words of a row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_at + row)
    if (tl.load(flags_at + slot) & MASKED) != 0:
        first = tl.program_id(1) * part
        end = tl.minimum(first + part, num_words)
        bits = tl.arange(0, word)[None, :]
        while first < end:
            nth = first + tl.arange(0, block)
            words = tl.load(masks_at + slot * num_words + nth, mask=nth < end, other=-1)[:, None]
            ids = nth[:, None] * word + bits
            # Whole words are skipped where they forbid nothing, and not read where they allow nothing. A condition of
            # a word is one of all its ids, so that a thread reads and writes several of these at once.
            some, most = words != 0, words != -1
            if vocab % word != 0:
                some, most = some & (ids < vocab), most & (ids < vocab)
            logits = tl.load(logits_at + row * stride + ids, mask=some & most, other=0.0)
            allowed = ((words >> bits) & 1) != 0
            nothing = tl.full((block, word), -INF, tl.float32).to(logits_at.dtype.element_ty)
            tl.store(logits_at + row * stride + ids, tl.where(allowed, logits, nothing), mask=most)
            first += block
