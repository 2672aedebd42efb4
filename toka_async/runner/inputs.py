"""A step's tensors: what the model and attention read, and which positions are sampled.

Built on the host in NumPy and copied to the device at once. Knows no model and no sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Bool, Int32, Int64, as_bool, as_i32
from toka_async.attention.base import AttentionBatch, PrefixGroup
from toka_async.messages import Step
from toka_async.runner.copies import upload
from toka_async.runner.rows import Rows


@dataclass(slots=True, frozen=True)
class StepRows:
    """The rows of a step on the host: decoding rows first, then chunks; arrays of one entry per row.

    slots: int32. lengths: int32, tokens of this step. contexts: int64, tokens of the row with this step's.
    firsts: int64, the row's first token in the step. samples: bool, a token is sampled from the row's last position.
    """

    num_decode: int
    slots: Int32
    lengths: Int32
    contexts: Int64
    firsts: Int64
    samples: Bool


@dataclass(slots=True, frozen=True)
class StepInputs:
    """A step's tensors on the device.

    token_ids, positions: int64 [t]. sampled: int64 [s], the tokens whose hidden states are sampled; None: all.
    sample_slots: int64 [s], the slots that sample.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    sampled: Tensor | None
    sample_slots: Tensor


def rows_of(rows: Rows, step: Step) -> StepRows:
    """The rows of a step whose events `rows` have applied."""
    num_decode = rows.order.size
    slots = np.concatenate([rows.order, as_i32(step.chunk_slots)])
    lengths = np.concatenate([np.ones(num_decode, dtype=np.int32), as_i32(step.chunk_lengths)])
    contexts = rows.positions[slots] + lengths
    assert (contexts <= rows.num_pages[slots] * rows.page_size).all(), "a row's pages do not hold its tokens"
    return StepRows(
        num_decode=num_decode,
        slots=slots,
        lengths=lengths,
        contexts=contexts,
        firsts=np.cumsum(lengths, dtype=np.int64) - lengths,
        samples=np.concatenate([np.ones(num_decode, dtype=np.bool_), as_bool(step.chunk_samples)]),
    )


def build_inputs(rows: Rows, step: Step, step_rows: StepRows) -> StepInputs:
    """The tensors of a step with at least one token."""
    layout = _layout(rows, step_rows)
    slots, sample_slots, positions, cells, offsets, sampled, chunk_ids = upload(
        (step_rows.slots, step_rows.slots[step_rows.samples], *layout, _chunk_ids(rows, step_rows)), rows.device
    )
    decoding = rows.last_tokens.index_select(0, slots[: step_rows.num_decode])
    width = -(-int(step_rows.contexts.max()) // rows.page_size)
    attention = AttentionBatch(
        num_decode=step_rows.num_decode,
        query_lengths=step_rows.lengths,
        context_lengths=step_rows.contexts.astype(np.int32),
        page_table=rows.page_table[:, :width].index_select(0, slots),
        write_indices=rows.page_table.view(-1).index_select(0, cells) * rows.page_size + offsets,
        groups=_groups(step) if step.group_starts else (),
    )
    return StepInputs(
        token_ids=torch.cat([decoding, chunk_ids]) if chunk_ids.numel() else decoding,
        positions=positions,
        attention=attention,
        sampled=None if sampled.numel() == positions.numel() else sampled,
        sample_slots=sample_slots,
    )


def _layout(rows: Rows, step_rows: StepRows) -> tuple[Int64, Int64, Int64, Int64]:
    """Per token: position, cell of its page in the flat page table, offset in the page; and which are sampled."""
    slots, lengths, firsts = step_rows.slots.astype(np.int64), step_rows.lengths, step_rows.firsts
    positions = step_rows.contexts - lengths
    if slots.size > step_rows.num_decode:
        slots = np.repeat(slots, lengths)
        positions = np.repeat(positions - firsts, lengths) + np.arange(slots.size)
    places = positions // rows.page_size
    cells = slots * rows.page_table.shape[1] + places
    return positions, cells, positions - places * rows.page_size, (firsts + lengths - 1)[step_rows.samples]


def _chunk_ids(rows: Rows, step_rows: StepRows) -> Int32:
    """The tokens of all chunks, one after the other."""
    if step_rows.slots.size == step_rows.num_decode:
        return step_rows.slots[:0]
    chunks = slice(step_rows.num_decode, None)
    ends = step_rows.contexts[chunks].tolist()
    lengths = step_rows.lengths[chunks].tolist()
    prompts = rows.prompts[step_rows.slots[chunks]]
    parts = [p.token_ids[end - length : end] for p, end, length in zip(prompts, ends, lengths, strict=True)]
    ids: Int32 = np.concatenate(parts)
    assert ids.size == sum(lengths), "a chunk goes beyond its prompt"
    return ids


def _groups(step: Step) -> tuple[PrefixGroup, ...]:
    columns = (as_i32(step.group_starts), as_i32(step.group_rows), as_i32(step.group_pages))
    return tuple(PrefixGroup(*group) for group in zip(*(c.tolist() for c in columns), strict=True))
