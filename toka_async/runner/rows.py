"""The rows of a rank: tables over slots, which only the events of steps change.

Host columns are NumPy; what the device reads in every step is in `DeviceRows`. Work is per event: steady decoding
touches no Python object per row. Knows no requests, no model and no attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from toka_async.arrays import Float32, Int32, Int64, as_f32, as_i32, as_i64, next_rows
from toka_async.messages import Prompt, Ready, Step, TokenSampling
from toka_async.model.sampling import PARAMS, Params, make_params
from toka_async.runner.copies import upload
from toka_async.runner.device_rows import DeviceRows

FEW_IDS = 32  # that Python sorts faster than NumPy


@dataclass(slots=True, frozen=True, eq=False)
class RowPrompt:
    """A prompt, shared by the rows admitted with its key. It lives as long as one of them or its key.

    token_ids: int32 [p]. num_prompt: how many leading ids are the user's. pages: int32, full pages that the rows share.
    params: PARAMS [1]. prompt_temperature: of log-probs of the prompt. end_ids, bias_ids, allowed_ids: int32, distinct
    ids of the vocabulary only. bias: float32.
    """

    token_ids: Int32
    num_prompt: int
    pages: Int32
    params: Params
    num_prompt_logprobs: int
    prompt_temperature: float
    end_ids: Int32
    bias_ids: Int32
    bias: Float32
    allowed_ids: Int32
    grammar: str = ""


def read_prompt(prompt: Prompt, vocab_size: int) -> RowPrompt:
    """Copies a prompt, so that its message can be freed. Leaves out ids outside the vocabulary: they have no logit."""
    sampling = prompt.sampling
    bias_ids, bias = read_bias(sampling, vocab_size)
    return RowPrompt(
        token_ids=as_i32(prompt.token_ids).copy(),
        num_prompt=prompt.num_prompt,
        pages=as_i32(prompt.pages).copy(),
        params=make_params(sampling),
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        prompt_temperature=sampling.prompt_temperature,
        end_ids=read_ids(sampling.end_ids, vocab_size),
        bias_ids=bias_ids,
        bias=bias,
        allowed_ids=read_ids(sampling.allowed_ids, vocab_size),
        grammar=sampling.grammar,
    )


def read_ids(field: memoryview, vocab_size: int) -> Int32:
    """Reads distinct ids of the vocabulary, ascending. For a few, NumPy takes ten times as long, before a step."""
    ids = as_i32(field)
    if ids.size > FEW_IDS:
        return np.unique(ids[(ids >= 0) & (ids < vocab_size)])
    return np.array(sorted({each for each in ids.tolist() if 0 <= each < vocab_size}), dtype=np.int32)


def read_bias(sampling: TokenSampling, vocab_size: int) -> tuple[Int32, Float32]:
    """Reads the distinct ids of the vocabulary that have a bias, and their biases."""
    ids, values = as_i32(sampling.bias_ids), as_f32(sampling.bias_values)
    if not ids.size:  # as most prompts have it; new arrays, since these would keep the message
        return np.empty(0, np.int32), np.empty(0, np.float32)
    valid = (ids >= 0) & (ids < vocab_size)
    distinct, places = np.unique(ids[valid], return_inverse=True)
    return distinct, np.bincount(places, values[valid], distinct.size).astype(np.float32)


@dataclass(slots=True, frozen=True)
class _Cells:
    """Cells of the page table: row `slots`, column `places`, value `pages`, all [n]."""

    slots: Int32
    places: Int64
    pages: Int32


class RowTables:
    """Tables over `max_seqs` slots.

    order: int32 [rows], the decoding slots. positions: int64, how many tokens of a slot have keys and values in the
    cache. num_pages: int64. num_prompt: int64, tokens of the user's prompt. seeds: int64. params: PARAMS. prompts:
    RowPrompt or None. on_device: the tables that the device reads. masks: int32 [max_seqs + 1, words] on the device,
    bits of the ids that grammars allow, which `GrammarMasks` fills; None: no row may have a grammar.
    """

    def __init__(self, ready: Ready, device: torch.device) -> None:
        max_seqs = ready.max_seqs
        self.page_size = ready.page_size
        self.vocab_size = ready.vocab_size
        self.device = device
        self.order: Int32 = np.empty(0, dtype=np.int32)
        self.positions: Int64 = np.zeros(max_seqs, dtype=np.int64)
        self.num_pages: Int64 = np.zeros(max_seqs, dtype=np.int64)
        self.num_prompt: Int64 = np.zeros(max_seqs, dtype=np.int64)
        self.seeds: Int64 = np.zeros(max_seqs, dtype=np.int64)
        self.params: npt.NDArray[np.void] = np.zeros(max_seqs, dtype=PARAMS)
        self.prompts: npt.NDArray[np.object_] = np.full(max_seqs, None, dtype=object)
        # A GPU's kernels find the table where it was when they were captured: as wide as a row can ever be.
        most = -(-ready.max_context // ready.page_size) + 1
        width = 8 if device.type == "cpu" else most
        self.on_device = DeviceRows(max_seqs, ready.page_size, width, ready.num_pages, device, ready.num_window_pages)
        self.masks: torch.Tensor | None = None
        self._known: dict[int, RowPrompt] = {}

    def apply(self, step: Step) -> Int32:
        """Applies the step's events on rows, in the order of its fields. The caller copies pages.

        Returns the admitted slots, whose sampling parameters are new.
        """
        for key in as_i32(step.dropped_prompts).tolist():
            del self._known[key]
        freed, admitted = as_i32(step.freed), as_i32(step.admit_slots)
        self.prompts[freed] = None
        for prompt in step.prompts:
            self._known[prompt.key] = read_prompt(prompt, self.vocab_size)
        if step.window_pages:
            self.on_device.set_windows(as_i32(step.window_pages).reshape(-1, 2))
        if admitted.size or step.page_slots:
            self._admit_and_append(step, admitted)
        if step.chunk_slots and self.on_device.beside is not None:
            starts = self.positions[as_i32(step.chunk_slots)]
            ends = starts + as_i32(step.chunk_lengths)
            self.on_device.renew_windows(int(starts.min()) // self.page_size, -(-int(ends.max()) // self.page_size))
        if step.order:
            self.order = as_i32(step.order).copy()
        elif freed.size or step.joined:
            self.order = next_rows(self.order, freed, as_i32(step.joined))
        return admitted

    def advance(self, slots: Int32, lengths: Int32) -> None:
        """Records that the slots' next `lengths` tokens are computed."""
        self.positions[slots] += lengths

    def _admit_and_append(self, step: Step, slots: Int32) -> None:
        tokens, cells = self._admit(step, slots)
        cells.append(self._append(step))
        at_slots, places, pages = (np.concatenate([getattr(c, name) for c in cells]) for name in _Cells.__slots__)
        rows = self.on_device
        if places.size:
            rows.widen(int(places.max()) + 1)
        at = at_slots.astype(np.int64) * rows.page_table.shape[1] + places
        # No cell is written twice: slots are admitted once a step, and their own pages follow the shared ones.
        columns = (at, pages, slots, tokens, self.positions[slots])
        cells_at, page_ids, slots_at, token_ids, positions = upload(columns, self.device)
        rows.set_pages(cells_at, page_ids)
        if slots.size:
            rows.last_tokens.index_copy_(0, slots_at, token_ids)
            rows.positions.index_copy_(0, slots_at, positions)

    def _admit(self, step: Step, slots: Int32) -> tuple[Int32, list[_Cells]]:
        """Fills the host columns of admitted rows; returns their next tokens [a] and the cells of their pages."""
        keys, starts = as_i32(step.admit_keys), as_i32(step.admit_starts)
        self.positions[slots] = starts
        self.seeds[slots] = as_i64(step.admit_seeds)
        tokens = np.empty(slots.size, dtype=np.int32)
        cells = []
        for indices in group_by_key(keys):
            prompt = self._known[int(keys[indices[0]])]
            same = slots[indices]
            tokens[indices] = prompt.token_ids[starts[indices]]
            self.params[same] = prompt.params
            self.prompts[same] = prompt
            self.num_prompt[same] = prompt.num_prompt
            count = prompt.pages.size
            self.num_pages[same] = count
            places = np.tile(np.arange(count, dtype=np.int64), same.size)
            cells.append(_Cells(np.repeat(same, count), places, np.tile(prompt.pages, same.size)))
        return tokens, cells

    def _append(self, step: Step) -> _Cells:
        """Returns the cells of appended pages. Several pages of one slot follow each other."""
        slots, pages = as_i32(step.page_slots), as_i32(step.page_ids)
        by_slot = np.argsort(slots, kind="stable")
        ordered = slots[by_slot]
        nth = np.arange(slots.size) - np.searchsorted(ordered, ordered)
        places = self.num_pages[ordered] + nth
        # Increasing within a slot: the last assignment of a slot is its new count.
        self.num_pages[ordered] = places + 1
        return _Cells(ordered, places, pages[by_slot])


def group_by_key(keys: Int32 | Int64) -> list[npt.NDArray[np.intp]]:
    """Returns the indices of each distinct key."""
    if keys.size <= 1:
        return [np.arange(1)] * keys.size
    by_key = np.argsort(keys, kind="stable")
    return np.split(by_key, np.flatnonzero(np.diff(keys[by_key])) + 1)
