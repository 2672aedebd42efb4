"""Computes log-probs of prompt tokens for the chunks that ask, in slabs: chunk x vocabulary is never in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.copies import to_device
from toka_async.model.logprobs import Logprobs, add_ranks, concatenate, distribution, select_logprobs
from toka_async.model.sampling import clean
from toka_async.runner.copies import upload
from toka_async.runner.inputs import StepRows
from toka_async.runner.rows import RowTables
from toka_async.runner.slab_sampler import Head, cut_slabs


@dataclass(slots=True, frozen=True)
class AskedChunk:
    """The prompt tokens that follow each token of a chunk, which is the step's tokens from `first` on.

    temperature: that the distribution is scaled by.
    """

    slot: int
    start: int
    num_top: int
    temperature: float
    first: int
    next_ids: Int32


def find_asked_chunks(rows: RowTables, step_rows: StepRows) -> list[AskedChunk]:
    """Finds the chunks whose requests want log-probs and that have a following prompt token."""
    asked = []
    for row in range(step_rows.num_decode, step_rows.slots.size):
        slot, length = int(step_rows.slots[row]), int(step_rows.lengths[row])
        prompt = rows.prompts[slot]
        start = int(step_rows.contexts[row]) - length
        next_ids = prompt.token_ids[start + 1 : min(start + 1 + length, prompt.num_prompt)]
        if prompt.num_prompt_logprobs >= 0 and next_ids.size:
            first, temperature = int(step_rows.firsts[row]), prompt.prompt_temperature
            asked.append(AskedChunk(slot, start, prompt.num_prompt_logprobs, temperature, first, next_ids))
    return asked


def compute_prompt_logprobs(hidden: Tensor, asked: Sequence[AskedChunk], head: Head, vocab_size: int) -> Logprobs:
    """Computes log-probs and ranks of the chunks' following tokens. hidden: [t, hidden] of the step."""
    sizes = [a.next_ids.size for a in asked]
    indices = np.concatenate([np.arange(a.first, a.first + a.next_ids.size) for a in asked])
    at, next_ids = upload((indices, np.concatenate([a.next_ids for a in asked])), hidden.device)
    num_top = np.repeat(np.asarray([a.num_top for a in asked], np.int32), sizes)
    temperatures = np.repeat(np.asarray([a.temperature for a in asked], np.float32), sizes)
    scale = to_device(temperatures, hidden.device) if (temperatures != 1).any() else None
    parts = []
    for part in cut_slabs(indices.size, vocab_size, hidden.device):
        values = distribution(clean(head(hidden[at[part]])), None if scale is None else scale[part])
        parts.append(add_ranks(values, next_ids[part], select_logprobs(values, next_ids[part], num_top[part])))
    return concatenate(parts)
