"""Edits of logits and raw log-probs by kernels against plain torch: random rows of all parameters together."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.sampling_rows import table_of
from toka_async.kernels.sampling import edit
from toka_async.kernels.sampling.edit import LIST_WIDTH, NUM_TOP, EditKernels, EditTable, RowTokens
from toka_async.kernels.sampling.kernels import RowTable, SamplingKernels
from toka_async.kernels.sampling.row import RAW
from toka_async.messages import TokenSampling
from toka_async.model import penalties
from toka_async.model.logprobs import distribution, select_logprobs
from toka_async.model.penalties import Penalties
from toka_async.model.sampling import Flag, clean

VOCAB, PAGE_SIZE, NUM_PAGES = 300, 4, 96


@dataclass(slots=True)
class Row:
    """tokens: prompt and output. bias, ends: by id, and ids."""

    sampling: TokenSampling
    tokens: list[int]
    num_prompt: int
    bias: dict[int, float] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    @property
    def flags(self) -> int:
        s = self.sampling
        flags: int = Flag.BIASED * bool(self.bias) | Flag.MIN_TOKENS * (s.min_tokens > 0)
        flags |= Flag.REPETITION * (s.repetition_penalty != 1) | Flag.LOGPROBS * (s.num_logprobs >= 0)
        flags |= Flag.COUNTED * (s.presence_penalty != 0 or s.frequency_penalty != 0)
        raw = s.num_logprobs > 0 or (
            s.num_logprobs == 0 and flags & (Flag.BIASED | Flag.MIN_TOKENS | Flag.COUNTED) != 0
        )
        return int(flags | int(RAW.value) * raw)

    def edit(self, logits: Tensor) -> Tensor:
        """What `model.penalties` makes of float32 logits [vocab]."""
        s, x = self.sampling, clean(logits.clone())[None]
        if self.bias:
            ids = torch.tensor([*self.bias])
            penalties.add_bias(x, torch.zeros_like(ids), ids, torch.tensor([*self.bias.values()]))
        if len(self.tokens) - self.num_prompt < s.min_tokens:
            x[0, self.ends] = -torch.inf
        values = ([s.presence_penalty], [s.frequency_penalty], [s.repetition_penalty])
        seen = Penalties(
            torch.tensor([self.tokens]),
            torch.tensor([len(self.tokens)]),
            torch.tensor([self.num_prompt]),
            *(torch.tensor(value) for value in values),
        )
        if self.flags & Flag.REPETITION:
            penalties.apply_repetition(x, seen)
        if self.flags & Flag.COUNTED:
            penalties.subtract_counts(x, seen)
        return x[0]


class Rows:
    """Rows in slots of a table, with padding in the last one."""

    def __init__(self, rows: list[Row], device: torch.device, max_rows: int = 16) -> None:
        self.rows = rows
        self.device = device
        seen = np.zeros((len(rows) + 1, VOCAB), dtype=np.bool_)
        for number, row in enumerate(rows):
            seen[number, row.tokens] = bool(row.flags & Flag.REPETITION)
        _, self.table = table_of([*(row.sampling for row in rows), TokenSampling()], seen, device)
        self.table.flags[:-1] = torch.tensor([row.flags for row in rows])
        self.table.num_prompt[:-1] = torch.tensor([row.num_prompt for row in rows])
        self.edits = self._make_edits()
        self.tokens = self._make_tokens()
        self.kernels = SamplingKernels(VOCAB, max_rows, device, chunk=128)
        self.editing = EditKernels(self.kernels, NUM_PAGES * PAGE_SIZE, device)

    def _make_edits(self) -> EditTable:
        num = len(self.rows) + 1

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor([*values, 0], dtype=dtype, device=self.device)

        samplings = [row.sampling for row in self.rows]
        edits = EditTable(
            presence=column([s.presence_penalty for s in samplings], torch.float32),
            frequency=column([s.frequency_penalty for s in samplings], torch.float32),
            min_tokens=column([s.min_tokens for s in samplings], torch.int32),
            num_bias=column([len(row.bias) for row in self.rows], torch.int32),
            num_ends=column([len(row.ends) for row in self.rows], torch.int32),
            num_top=column([max(s.num_logprobs, 0) for s in samplings], torch.int32),
            ids=torch.zeros(num, LIST_WIDTH, dtype=torch.int32, device=self.device),
            values=torch.zeros(num, LIST_WIDTH, dtype=torch.float32, device=self.device),
        )
        for number, row in enumerate(self.rows):
            listed = [*row.bias, *row.ends]
            edits.ids[number, : len(listed)] = torch.tensor(listed, dtype=torch.int32)
            edits.values[number, : len(row.bias)] = torch.tensor([*row.bias.values()])
        return edits

    def _make_tokens(self) -> RowTokens:
        rng = np.random.default_rng(0)
        pages = iter(rng.permutation(NUM_PAGES).tolist())
        history = rng.integers(0, VOCAB, (NUM_PAGES, PAGE_SIZE)).astype(np.int32)
        table = rng.integers(0, NUM_PAGES, (len(self.rows) + 1, 12)).astype(np.int32)
        for number, row in enumerate(self.rows):
            for first in range(0, len(row.tokens), PAGE_SIZE):
                part, page = row.tokens[first : first + PAGE_SIZE], next(pages)
                table[number, first // PAGE_SIZE] = page
                history[page, : len(part)] = part
        return RowTokens(torch.from_numpy(table).to(self.device), torch.from_numpy(history).to(self.device))

    def draw(self, logits: Tensor, slots: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Edited logits, tokens, log-probs, likeliest ids and theirs."""
        edited = logits.to(self.device).clone()
        at = torch.tensor(slots, device=self.device)
        lengths = [len(self.rows[slot].tokens) if slot < len(self.rows) else 0 for slot in slots]
        contexts = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        args = (at, contexts, self.table, self.edits, self.tokens)
        with np.errstate(over="ignore", invalid="ignore"):  # in lanes that are masked
            top_ids, top_values = self.editing.edit(edited, *args)
            seen_by_edit = self.table.seen.clone()
            drawn = self.kernels.draw(edited, at, contexts, self.table)
            self.editing.restore(edited, *args, drawn)
        self.table.seen.copy_(seen_by_edit)
        assert not self.editing._counts.any()
        assert not self.editing._num_saved.any()
        return (*(x.cpu() for x in (edited, *drawn, top_ids, top_values)),)  # type: ignore[return-value]

    def effective(self, edited: Tensor, slot: int) -> Tensor:
        """Edited logits [vocab] with the repetition penalty that the kernels apply as they read."""
        bits = np.unpackbits(self.table.seen[slot].cpu().numpy().view(np.uint8), bitorder="little")[:VOCAB]
        x, penalty = edited.float(), self.rows[slot].sampling.repetition_penalty
        return torch.where(torch.from_numpy(bits.astype(np.bool_)), torch.where(x > 0, x / penalty, x * penalty), x)


def make_random(rng: np.random.Generator) -> Row:
    """A row of any parameters, whose tokens and lists meet often."""
    ids = rng.choice(VOCAB, 40, replace=False)
    num_prompt, num_output = int(rng.integers(1, 8)), int(rng.integers(0, 30))
    counted = rng.random() < 0.6
    sampling = TokenSampling(
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        top_p=float(rng.choice([1.0, 0.8])),
        presence_penalty=float(rng.choice([0.0, 1.5, -0.7])) * counted,
        frequency_penalty=float(rng.choice([0.3, -0.2])) * counted,
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.3, 0.8])),
        min_tokens=int(rng.choice([0, 0, 5, 100])),
        num_logprobs=int(rng.choice([-1, 0, 3, NUM_TOP])),
    )
    bias = {}
    if rng.random() < 0.5:
        bias = {
            int(token): float(rng.normal(0, 5)) for token in rng.choice(ids, int(rng.integers(1, 20)), replace=False)
        }
    ends = (
        [int(token) for token in rng.choice(ids, int(rng.integers(1, 5)), replace=False)] if sampling.min_tokens else []
    )
    return Row(sampling, rng.choice(ids[:20], num_prompt + num_output).tolist(), num_prompt, bias, ends)


def normal(num: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "seed"), [*((torch.float32, seed) for seed in range(5)), (torch.bfloat16, 5), (torch.float16, 6)], ids=str
)
def test_random_rows_are_those_of_the_reference(device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """In an order of their own, with padding between them; then once more, with what the first time left behind."""
    rng = np.random.default_rng(seed)
    num = 9
    rows = Rows([make_random(rng) for _ in range(num)], device)
    slots = rng.permutation(num).tolist()
    slots[3:3] = [num, num]
    for turn in range(2):
        logits = normal(len(slots), seed + 100 * turn, dtype)
        edited, tokens, logprobs, top_ids, top_values = rows.draw(logits, slots)
        for at, slot in enumerate(slots):
            if slot == num:
                assert torch.equal(edited[at], logits[at])
                continue
            row = rows.rows[slot]
            expected, effective = row.edit(logits[at].float()), rows.effective(edited[at], slot)
            rounds_twice = bool(row.bias) and row.sampling.repetition_penalty != 1
            close = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] * (1 + rounds_twice)
            torch.testing.assert_close(effective, expected, rtol=close, atol=close)
            untouched = torch.ones(VOCAB, dtype=torch.bool)
            untouched[[*row.bias, *row.ends, *row.tokens]] = False
            assert torch.equal(edited[at][untouched], logits[at][untouched])
            check_logprobs(row, logits[at], int(tokens[at]), float(logprobs[at]), top_ids[at], top_values[at])


def check_logprobs(row: Row, logits: Tensor, token: int, logprob: float, top_ids: Tensor, top_values: Tensor) -> None:
    """Those of the logits before edits."""
    num_top = max(row.sampling.num_logprobs, 0)
    raw = distribution(logits[None])
    expected = select_logprobs(raw, torch.tensor([token]), np.asarray([num_top], np.int32))
    assert logprob == (pytest.approx(float(expected.chosen), abs=2e-6) if row.sampling.num_logprobs >= 0 else 0)
    assert torch.equal(raw[0, top_ids[:num_top].long()], expected.top[0])
    torch.testing.assert_close(top_values[:num_top], expected.top[0], atol=2e-6, rtol=2e-6)


def test_an_exact_float32_row(device: torch.device) -> None:
    """Bias and counts together, without the repetition penalty, whose reciprocal may round otherwise."""
    sampling = TokenSampling(presence_penalty=0.3, frequency_penalty=0.7, min_tokens=9)
    row = Row(sampling, [7, 8, 9, 9, 250, 9, 8, 7], 2, {8: 0.1, 9: -0.3, 40: 1.7}, [9, 60])
    logits = normal(1, 3)
    edited = Rows([row], device).draw(logits, [0])[0]
    assert torch.equal(edited[0], row.edit(logits[0]))
    assert edited[0, [9, 60]].tolist() == [-torch.inf] * 2


def test_a_value_is_rounded_once(device: torch.device) -> None:
    row = Row(TokenSampling(presence_penalty=0.3, frequency_penalty=0.7), [3, 8, 8], 1, {8: 0.1})
    logits = normal(1, 3, torch.bfloat16)
    edited = Rows([row], device).draw(logits, [0])[0]
    assert torch.equal(edited[0], row.edit(logits[0].float()).bfloat16())


def test_an_output_of_many_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, biased ids and end tokens fill several blocks, and a program has several rows."""
    monkeypatch.setattr(edit, "_BLOCK", 16)
    monkeypatch.setattr(edit, "_PROGRAMS", 2)
    rng = np.random.default_rng(5)
    sampling = TokenSampling(temperature=0, presence_penalty=0.5, frequency_penalty=0.1, min_tokens=50, num_logprobs=2)
    rows = [
        Row(sampling, rng.integers(0, 60, 44).tolist(), 3, {i: 0.3 * i for i in range(40, 80)}, [*range(100, 135)])
        for _ in range(5)
    ]
    logits = normal(5, 1)
    played = Rows(rows, device)
    edited, tokens, logprobs, top_ids, top_values = played.draw(logits, [3, 1, 0, 2, 4])
    for at, slot in enumerate([3, 1, 0, 2, 4]):
        torch.testing.assert_close(edited[at], rows[slot].edit(logits[at]), rtol=1e-6, atol=1e-6)
        assert int(tokens[at]) == int(edited[at].argmax())
        check_logprobs(rows[slot], logits[at], int(tokens[at]), float(logprobs[at]), top_ids[at], top_values[at])


def test_an_end_token_is_held_up_to_its_length(device: torch.device) -> None:
    sampling = TokenSampling(temperature=0, min_tokens=3)
    rows = [Row(sampling, [1] * (2 + generated), 2, ends=[77]) for generated in range(5)]
    logits = torch.zeros(5, VOCAB)
    logits[:, 77], logits[:, 9] = 2.0, 1.0
    assert Rows(rows, device).draw(logits, [*range(5)])[1].tolist() == [9, 9, 9, 77, 77]


def test_likeliest_tokens_with_ties_and_odd_numbers(device: torch.device) -> None:
    sampling = TokenSampling(num_logprobs=5)
    rows = [Row(sampling, [1], 1) for _ in range(4)]
    logits = normal(4, 2)
    logits[0, [290, 5, 130, 131, 66]] = 20.0
    logits[1] = 0.0
    logits[2, ::2], logits[2, [5, 7]] = torch.nan, torch.inf
    logits[3] = -torch.inf
    _, _, _, top_ids, top_values = Rows(rows, device).draw(logits, [0, 1, 2, 3])
    assert top_ids[:2, :5].tolist() == [[5, 66, 130, 131, 290], [0, 1, 2, 3, 4]]
    assert top_ids[2, :2].tolist() == [5, 7]
    expected = distribution(clean(logits.clone()))
    for at in range(4):
        torch.testing.assert_close(top_values[at, :5], expected[at, top_ids[at, :5].long()], atol=2e-6, rtol=2e-6)


def test_a_vocabulary_smaller_than_what_is_asked_for(device: torch.device) -> None:
    rows = Rows([Row(TokenSampling(num_logprobs=NUM_TOP), [1], 1)], device)
    kernels = SamplingKernels(7, 4, device, chunk=64)
    table: RowTable = rows.table
    logits, at = torch.arange(7.0, device=device)[None], torch.zeros(1, dtype=torch.int64, device=device)
    contexts = torch.ones(1, dtype=torch.int32, device=device)
    top_ids, _ = EditKernels(kernels, 8, device).edit(logits, at, contexts, table, rows.edits, rows.tokens)
    assert top_ids[0, :7].tolist() == [6, 5, 4, 3, 2, 1, 0]


def test_no_rows(device: torch.device) -> None:
    rows = Rows([Row(TokenSampling(num_logprobs=2), [1], 1)], device)
    assert [len(x) for x in rows.draw(normal(1, 0)[:0], [])] == [0] * 5
