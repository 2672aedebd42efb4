"""Builds a step's tensors: what the model and attention read, and which positions are sampled.

Decoding rows come from the device's tables. Only chunks of prompts are built on the host, in NumPy, and copied to the
device in one go. Knows no model and no sampling.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Bool, Int32, Int64, as_bool, as_i32
from toka_async.attention.base import AttentionBackend, AttentionBatch, ChunkStates, PrefixGroup
from toka_async.messages import Step
from toka_async.runner.copies import upload
from toka_async.runner.rows import RowTables


class StepModel(Protocol):
    """The part of a decoder that a step calls; `model.decoder` implements it."""

    def forward(
        self, inputs: Tensor, positions: Tensor, attention: AttentionBackend, wanted: Tensor | None = None
    ) -> Tensor: ...

    def begin(self, inputs: Tensor, positions: Tensor, attention: AttentionBackend) -> tuple[Tensor, Tensor]: ...

    def finish(self, attended: Tensor, residual: Tensor, wanted: Tensor | None = None) -> Tensor: ...

    def rehearse(self) -> AbstractContextManager[None]: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(slots=True, frozen=True)
class StepRows:
    """The rows of a step on the host: decoding rows first, then chunks. Each array has one entry per row.

    slots: int32. lengths: int32, tokens in this step. contexts: int64, tokens of the row, this step's included. firsts:
    int64, the row's first token in the step. samples: bool, whether a token is sampled from the row's last position.
    saves: of the whole step: a slot, after how many of its tokens its recurrent state is kept, and in which snapshot.
    """

    num_decode: int
    slots: Int32
    lengths: Int32
    contexts: Int64
    firsts: Int64
    samples: Bool
    saves: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return int(self.firsts[-1] + self.lengths[-1])

    def list_sampled(self) -> tuple[Int64, Int32, Int64]:
        """Lists the tokens whose hidden states are sampled, and the slots and contexts of their rows."""
        return (self.firsts + self.lengths - 1)[self.samples], *self.list_sampling()

    def list_sampling(self) -> tuple[Int32, Int64]:
        """Lists the slots and contexts of the rows that sample."""
        return self.slots[self.samples], self.contexts[self.samples]


@dataclass(slots=True, frozen=True)
class SampledTokens:
    """What a step samples, on the device.

    tokens: int64 [s], whose hidden states are sampled; None: all. slots: int64 [s]. contexts: int32 [s].
    """

    tokens: Tensor | None
    slots: Tensor
    contexts: Tensor


@dataclass(slots=True, frozen=True)
class StepInputs:
    """A step's tensors on the device. token_ids, positions: int64 [t]."""

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    sampled: SampledTokens


def make_step_rows(rows: RowTables, step: Step) -> StepRows:
    """Makes the rows of a step. `rows` must have applied its events."""
    num_decode = rows.order.size
    if not step.chunk_slots:
        slots, lengths = rows.order, np.ones(num_decode, dtype=np.int32)
        samples = np.ones(num_decode, dtype=np.bool_)
    else:
        slots = np.concatenate([rows.order, as_i32(step.chunk_slots)])
        lengths = np.concatenate([np.ones(num_decode, dtype=np.int32), as_i32(step.chunk_lengths)])
        samples = np.concatenate([np.ones(num_decode, dtype=np.bool_), as_bool(step.chunk_samples)])
    contexts, kept = rows.positions[slots] + lengths, as_i32(step.save_slots)
    ends = rows.positions[kept] + as_i32(step.save_lengths)
    assert (contexts <= rows.num_pages[slots] * rows.page_size).all(), "a row's pages do not hold its tokens"
    return StepRows(
        num_decode=num_decode,
        slots=slots,
        lengths=lengths,
        contexts=contexts,
        firsts=np.cumsum(lengths, dtype=np.int64) - lengths,
        samples=samples,
        saves=tuple(zip(kept.tolist(), ends.tolist(), as_i32(step.save_snapshots).tolist(), strict=True)),
    )


def build_inputs(rows: RowTables, step_rows: StepRows, groups: tuple[PrefixGroup, ...]) -> StepInputs:
    """Builds the tensors of a step with at least one token."""
    decode = rows.on_device.decode_inputs(step_rows.num_decode)
    if step_rows.slots.size == step_rows.num_decode:
        attention = make_attention_batch(rows, step_rows, decode.slots, decode.contexts, decode.write_indices, groups)
        sampled = SampledTokens(None, decode.slots, decode.contexts)
        return StepInputs(decode.token_ids, decode.positions, attention, sampled)
    token_ids, positions, cells, offsets, slots, contexts, tokens, sample_slots, sample_contexts = upload(
        (read_chunk_ids(rows, step_rows), *_locate_chunks(rows, step_rows), *_list_chunk_rows(step_rows)), rows.device
    )
    table = rows.on_device.page_table
    write_indices = table.view(-1).index_select(0, cells).long() * rows.page_size + offsets
    contexts = torch.cat([decode.contexts, contexts.to(torch.int32)])
    slots = torch.cat([decode.slots, slots])
    attention = make_attention_batch(
        rows, step_rows, slots, contexts, torch.cat([decode.write_indices, write_indices]), groups
    )
    every_token = tokens.numel() == write_indices.numel() + step_rows.num_decode
    return StepInputs(
        token_ids=torch.cat([decode.token_ids, token_ids]),
        positions=torch.cat([decode.positions, positions]),
        attention=attention,
        sampled=SampledTokens(None if every_token else tokens, sample_slots, sample_contexts.to(torch.int32)),
    )


def make_attention_batch(
    rows: RowTables,
    step_rows: StepRows,
    slots: Tensor,
    contexts: Tensor,
    write_indices: Tensor,
    groups: tuple[PrefixGroup, ...],
) -> AttentionBatch:
    return AttentionBatch(
        num_decode=step_rows.num_decode,
        query_lengths=step_rows.lengths,
        context_lengths=step_rows.contexts.astype(np.int32),
        contexts=contexts,
        slots=slots,
        page_table=rows.on_device.page_table,
        write_indices=write_indices,
        groups=groups,
        windows=rows.on_device.describe_windows(write_indices),
        states=None if step_rows.num_decode == step_rows.slots.size else find_saves(step_rows),
    )


def find_saves(step_rows: StepRows) -> ChunkStates:
    """Finds the states to keep within the chunks: a step in parts has each in the part that computes its last token."""
    first = step_rows.num_decode
    slots, lengths, ends = step_rows.slots[first:], step_rows.lengths[first:], step_rows.contexts[first:]
    saves = []
    for slot, position, snapshot in step_rows.saves:
        chunks = np.flatnonzero((slots == slot) & (ends - lengths < position) & (position <= ends)).tolist()
        saves += [(chunk, int(position - ends[chunk] + lengths[chunk]), snapshot) for chunk in chunks]
    return ChunkStates(slots, tuple(saves))


def read_groups(step: Step) -> tuple[PrefixGroup, ...]:
    if not step.group_starts:
        return ()
    columns = (as_i32(step.group_starts), as_i32(step.group_rows), as_i32(step.group_pages))
    return tuple(PrefixGroup(*group) for group in zip(*(c.tolist() for c in columns), strict=True))


def _list_chunk_rows(step_rows: StepRows) -> tuple[Int32, Int64, Int64, Int32, Int64]:
    """Lists slots and contexts of the chunks, then last tokens, slots and contexts of all rows that sample."""
    chunks = slice(step_rows.num_decode, None)
    return step_rows.slots[chunks], step_rows.contexts[chunks], *step_rows.list_sampled()


def _locate_chunks(rows: RowTables, step_rows: StepRows) -> tuple[Int64, Int64, Int64]:
    """Locates each token of the chunks: position, cell of its page in the flat page table, offset in the page."""
    chunks = slice(step_rows.num_decode, None)
    lengths = step_rows.lengths[chunks]
    firsts = step_rows.firsts[chunks] - step_rows.num_decode
    starts = step_rows.contexts[chunks] - lengths
    positions = np.repeat(starts - firsts, lengths) + np.arange(lengths.sum())
    places = positions // rows.page_size
    slots = np.repeat(step_rows.slots[chunks].astype(np.int64), lengths)
    return positions, slots * rows.on_device.page_table.shape[1] + places, positions - places * rows.page_size


def read_chunk_ids(rows: RowTables, step_rows: StepRows) -> Int32:
    """Reads the tokens of all chunks, one chunk after the other."""
    chunks = slice(step_rows.num_decode, None)
    ends = step_rows.contexts[chunks].tolist()
    lengths = step_rows.lengths[chunks].tolist()
    prompts = rows.prompts[step_rows.slots[chunks]]
    parts = [p.token_ids[end - length : end] for p, end, length in zip(prompts, ends, lengths, strict=True)]
    ids: Int32 = np.concatenate(parts)
    assert ids.size == sum(lengths), "a chunk goes beyond its prompt"
    return ids
