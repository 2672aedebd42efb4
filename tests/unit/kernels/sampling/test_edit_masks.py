"""Draws by masks, bit for bit those of logits in which -inf was written where a mask has no bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.sampling_rows import INDEX, table_of
from toka_async.arrays import f32_column, i32_column
from toka_async.kernels.sampling.edit import LIST_WIDTH, EditKernels, EditTable, RowTokens
from toka_async.kernels.sampling.kernels import RowTable, SamplingKernels
from toka_async.kernels.sampling.row import RAW, TOP
from toka_async.messages import LogprobKind, TokenSampling
from toka_async.model import penalties
from toka_async.model.sampling import Flag

VOCAB, CHUNK, CANDIDATES = 161, 64, 32
NUM_PROMPT, PAGE_SIZE = 7, 4
BIASED: dict[str, Any] = {"bias_ids": i32_column([3, 70, 160]), "bias_values": f32_column([2.0, -1.0, 4.0])}
SAMPLINGS = [
    TokenSampling(temperature=0.0, num_logprobs=0),
    TokenSampling(),
    TokenSampling(temperature=0.7, num_logprobs=0, logprob_kind=LogprobKind.TEMPERATURE),
    TokenSampling(top_p=0.8, temperature=3.0, num_logprobs=2, logprob_kind=LogprobKind.PROCESSED),
    TokenSampling(temperature=0.0, repetition_penalty=1.5, num_logprobs=2, logprob_kind=LogprobKind.TEMPERATURE),
    TokenSampling(top_k=50, temperature=2.0),  # more than there are candidates
    TokenSampling(top_k=5, repetition_penalty=1.4, num_logprobs=3),
    TokenSampling(min_p=0.05, top_k=40, top_p=0.9, temperature=2.0, num_logprobs=0, logprob_kind=LogprobKind.PROCESSED),
    TokenSampling(presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=0.8, num_logprobs=4),
    TokenSampling(top_p=0.97, temperature=9.0),  # flat: the pilot finds bounds
    TokenSampling(top_k=3, presence_penalty=2.0, num_logprobs=0, **BIASED),
    TokenSampling(temperature=0.0, num_logprobs=0, **BIASED),
]
MASKS = ("few", "half", "all", "none", "off")
WORKSPACE = ("bounds", "maxima", "_sums", "_stats")  # of a draw, which its later kernels read
UNWRITTEN = 7.5


def make_mask(kind: str, rng: np.random.Generator, vocab: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """The allowed ids. A row without a mask has a slot that allows nothing."""
    share = {"few": 0.0, "half": 0.5, "all": 1.0}.get(kind, 0.0)
    allowed = rng.random(vocab) < share
    if kind in ("few", "half"):
        allowed[rng.integers(0, vocab, 4)] = True
    return allowed


def fill_workspace(kernels: SamplingKernels) -> list[Tensor]:
    parts: list[Tensor] = [getattr(kernels, name) for name in WORKSPACE]
    for part in parts:
        part.fill_(UNWRITTEN)
    return parts


class Masked:
    """Rows of these samplings and masks, row i in slot i."""

    def __init__(self, samplings: list[TokenSampling], kinds: list[str], vocab: int, device: torch.device) -> None:
        rng = np.random.default_rng(len(kinds))
        num = len(samplings)
        params, self.table = table_of(samplings, rng.random((num, vocab)) < 0.3, device)
        flags, num_logprobs = params["flags"], params["num_logprobs"]
        scaled = (flags & Flag.SCALED) != 0
        flags = flags | np.array([0 if kind == "off" else int(Flag.MASKED) for kind in kinds])
        flags |= RAW.value * (~scaled & (num_logprobs >= 0)) | TOP.value * (scaled & (num_logprobs > 0))
        self.table.flags.copy_(torch.from_numpy(flags))
        self.vocab, self.kinds, self.device = vocab, kinds, device
        self.allowed = np.stack([make_mask(kind, rng, vocab) for kind in kinds])
        padded = np.pad(self.allowed, ((0, 0), (0, -vocab % 32)))
        self.masks = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32)).to(device)
        self.num_top = torch.from_numpy(np.maximum(num_logprobs, 0))
        self.slots = torch.from_numpy(rng.permutation(num)).to(device)
        self.contexts = torch.full((num,), NUM_PROMPT + INDEX, dtype=torch.int32, device=device)
        pages = torch.arange(num * 3, dtype=torch.int32, device=device)
        history = torch.from_numpy(rng.integers(0, vocab, (num * 3, PAGE_SIZE)).astype(np.int32)).to(device)
        self.tokens = RowTokens(pages.view(num, 3), history)
        self.edits = self._make_edits(samplings)

    def _make_edits(self, samplings: list[TokenSampling]) -> EditTable:
        num = len(samplings)
        ids = torch.zeros(num, LIST_WIDTH, dtype=torch.int32, device=self.device)
        values = torch.zeros(num, LIST_WIDTH, device=self.device)
        nothing = torch.zeros(num, dtype=torch.int32, device=self.device)
        num_bias = nothing.clone()
        for slot, sampling in enumerate(samplings):
            num_bias[slot] = size = len(sampling.bias_ids)
            ids[slot, :size] = torch.tensor(list(sampling.bias_ids), dtype=torch.int32)
            values[slot, :size] = torch.tensor(list(sampling.bias_values))
        penalties_of = [[s.presence_penalty, s.frequency_penalty] for s in samplings]
        presence, frequency = torch.tensor(penalties_of, device=self.device).T.contiguous()
        num_top = self.num_top.to(self.device, torch.int32)
        return EditTable(presence, frequency, nothing, num_bias, nothing, num_top, ids, values)

    def copy_table(self, **changed: Tensor) -> RowTable:
        return replace(self.table, **({"seen": self.table.seen.clone()} | changed))

    def draw(self, kernels: SamplingKernels, logits: Tensor) -> dict[str, Tensor]:
        """By masks."""
        editing, table = EditKernels(kernels, self.tokens.history.numel(), self.device), self.copy_table()
        logits = logits.clone()
        rows = (logits, self.slots, self.contexts, table, self.edits, self.tokens)
        tops = editing.edit(*rows, self.masks)
        workspace = fill_workspace(kernels)
        token_ids, logprobs, *kept = kernels.draw_measured(*rows[:4], self.masks)
        editing.restore(*rows, (token_ids, logprobs), self.masks)
        sums = [part.clone() for part in workspace]
        return self._name(token_ids, logprobs, *kept, *tops, table.seen, *sums)

    def draw_forbidden(self, kernels: SamplingKernels, logits: Tensor) -> dict[str, Tensor]:
        """Likewise, with -inf in the logits after edits, and without masks."""
        editing, other = (EditKernels(kernels, self.tokens.history.numel(), self.device) for _ in range(2))
        table, logits = self.copy_table(), logits.clone()
        rows = (logits, self.slots, self.contexts, table, self.edits, self.tokens)
        raw_tops = editing.edit(*rows)
        at = torch.nonzero(table.flags[self.slots] & int(Flag.MASKED))[:, 0]
        penalties.apply_masks(logits, at, self.masks[self.slots[at]])
        edits = int(Flag.BIASED | Flag.COUNTED) | RAW.value
        unedited = replace(table, flags=table.flags & ~edits)
        allowed_tops = other.edit(logits, self.slots, self.contexts, unedited, self.edits, self.tokens)
        is_raw = ((table.flags[self.slots] & RAW.value) != 0)[:, None]
        tops = tuple(torch.where(is_raw, *pair) for pair in zip(raw_tops, allowed_tops, strict=True))
        workspace = fill_workspace(kernels)
        token_ids, logprobs, *kept = kernels.draw_measured(*rows[:4])
        editing.restore(*rows, (token_ids, logprobs))
        sums = [part.clone() for part in workspace]
        return self._name(token_ids, logprobs, *kept, *tops, table.seen, *sums)

    def _name(self, *drawn: Tensor) -> dict[str, Tensor]:
        """Of the likeliest tokens only those that a row asks for."""
        names = ("token_ids", "logprobs", "kept", "masses", "top_ids", "top_values", "seen", *WORKSPACE)
        named = {name: tensor.cpu() for name, tensor in zip(names, drawn, strict=True)}
        unasked = torch.arange(named["top_ids"].shape[1]) >= self.num_top[self.slots.cpu()][:, None]
        for name in ("top_ids", "top_values"):
            named[name].masked_fill_(unasked, 0)
        return named

    def check(self, kernels: SamplingKernels, logits: Tensor) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # in lanes that are masked
            drawn, expected = self.draw(kernels, logits), self.draw_forbidden(kernels, logits)
        for name, tensor in expected.items():
            written = tensor != UNWRITTEN if name in WORKSPACE else torch.ones_like(tensor, dtype=torch.bool)
            assert torch.equal(drawn[name][written], tensor[written]), name
        for slot, token in zip(self.slots.tolist(), drawn["token_ids"].tolist(), strict=True):
            if self.kinds[slot] == "none":
                assert token == 0
            elif self.kinds[slot] != "off":
                assert self.allowed[slot, token]


@pytest.mark.parametrize("shift", range(len(MASKS)))
@pytest.mark.parametrize("first", range(0, len(SAMPLINGS), 2))
def test_masks_are_as_minus_infinity_in_the_logits(device: torch.device, first: int, shift: int) -> None:
    """All masks with all samplings, in turn."""
    samplings = SAMPLINGS[first : first + 2]
    kernels = SamplingKernels(VOCAB, 4, device, chunk=CHUNK, num_candidates=CANDIDATES)
    kinds = [MASKS[(shift + number) % len(MASKS)] for number in range(len(samplings))]
    logits = 2 * torch.randn(len(samplings), VOCAB, generator=torch.Generator().manual_seed(shift))
    dtype = (torch.float32, torch.bfloat16)[(first // 2 + shift) % 2]
    Masked(samplings, kinds, VOCAB, device).check(kernels, logits.to(device, dtype))


@pytest.mark.parametrize("vocab", [1, 31, 64, 97])
def test_masks_of_small_vocabularies(device: torch.device, vocab: int) -> None:
    kernels = SamplingKernels(vocab, 4, device, chunk=64, num_candidates=CANDIDATES)
    samplings = [TokenSampling(num_logprobs=1), TokenSampling(top_p=0.9), TokenSampling(temperature=0.0, top_k=2)]
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    Masked(samplings, ["half", "none", "all"], vocab, device).check(kernels, logits.to(device))


def test_forbidden_numbers_that_are_none_do_not_matter(device: torch.device) -> None:
    """They are not even repaired. Allowed ones are, within the mask."""
    kernels = SamplingKernels(VOCAB, 4, device, chunk=CHUNK, num_candidates=CANDIDATES)
    samplings = [TokenSampling(num_logprobs=0), TokenSampling(top_k=4), TokenSampling(temperature=0.0)]
    rows = Masked(samplings, ["half"] * 3, VOCAB, device)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    forbidden = torch.from_numpy(~rows.allowed[rows.slots.cpu().numpy()])
    logits[forbidden] = torch.tensor([torch.nan, torch.inf]).repeat(VOCAB * 3)[: int(forbidden.sum())]
    rows.check(kernels, logits.to(device))
    allowed = torch.nonzero(~forbidden[1])[:5, 0]
    logits[1, allowed[0]], logits[1, allowed[3]] = torch.nan, torch.inf
    rows.check(kernels, logits.to(device))
