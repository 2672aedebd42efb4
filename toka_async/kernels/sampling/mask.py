"""Forbids the tokens that grammars do not allow, after all other edits of logits and before the draw."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.sampling.row import INF, MASKED

_PARTS = 8  # programs of a row
_BLOCK = 2048  # ids that a program looks at together


def apply_masks(logits: Tensor, slots: Tensor, flags: Tensor, masks: Tensor) -> None:
    """Sets logits [s, vocab] of rows flagged MASKED to -inf where the slot's mask has no bit, in place.

    Args:
        slots: int64 [s].
        flags: int32 [num_slots].
        masks: int32 [num_slots, ceil(vocab / 32)], contiguous: a bit for each id, lowest first.
    """
    num_rows, vocab = logits.shape
    assert masks.shape[1] == triton.cdiv(vocab, 32)
    if num_rows:
        part = triton.cdiv(triton.cdiv(vocab, _PARTS), _BLOCK) * _BLOCK
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
):
    """A program masks `part` ids of a row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_at + row)
    if (tl.load(flags_at + slot) & MASKED) != 0:
        start = tl.program_id(1) * part
        end = tl.minimum(start + part, vocab)
        while start < end:
            ids = start + tl.arange(0, block)
            words = tl.load(masks_at + slot * num_words + ids // 32, mask=ids < end, other=-1)
            forbidden = (((words >> (ids & 31)) & 1) == 0) & (ids < end)
            nothing = tl.full((block,), -INF, tl.float32)
            tl.store(
                logits_at + row * stride + ids, nothing.to(logits_at.dtype.element_ty), mask=forbidden & (ids < end)
            )
            start += block
