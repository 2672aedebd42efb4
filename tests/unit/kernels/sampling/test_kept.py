"""Log-probs after temperature and after filters, and what filters keep: the kernels against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.sampling_rows import INDEX, kept_by, penalised, table_of, weights_of
from toka_async.kernels.sampling.kernels import RowTable, SamplingKernels
from toka_async.messages import LogprobKind, TokenSampling
from toka_async.model.logprobs import distribution
from toka_async.model.sampling import measure_filters

VOCAB, CHUNK, CANDIDATES = 300, 128, 8
NUM_PROMPT = 7


@pytest.fixture
def kernels(device: torch.device) -> SamplingKernels:
    return SamplingKernels(VOCAB, 16, device, chunk=CHUNK, num_candidates=CANDIDATES)


def normal(rows: int, dtype: torch.dtype, spread: float = 2.0) -> Tensor:
    return (spread * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))).to(dtype)


def ask(kind: LogprobKind, **fields: float) -> TokenSampling:
    return TokenSampling(num_logprobs=0, logprob_kind=kind, **fields)  # type: ignore[arg-type]


def draw(kernels: SamplingKernels, logits: Tensor, table: RowTable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, log-probs before filters, kept, masses; slot i for row i."""
    device = table.flags.device
    at = torch.arange(len(logits), device=device)
    contexts = torch.full((len(logits),), NUM_PROMPT + INDEX, dtype=torch.int32, device=device)
    tokens, logprobs, kept, masses = kernels.draw_measured(logits.to(device), at, contexts, table)
    return tokens.cpu(), logprobs.cpu(), kept.cpu(), masses.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probs_after_penalties_and_temperature(
    kernels: SamplingKernels, device: torch.device, dtype: torch.dtype
) -> None:
    logits = normal(8, dtype)
    kind = LogprobKind.TEMPERATURE
    samplings = [
        ask(kind),
        ask(kind, temperature=0.6),
        ask(kind, temperature=0),
        ask(kind, temperature=1.4, repetition_penalty=1.5),
        ask(kind, temperature=0, repetition_penalty=1.5),
        ask(kind, temperature=0.7, top_p=0.6),
        ask(kind, temperature=0.7, top_k=1),
        ask(LogprobKind.PROCESSED, temperature=0.4),  # without filters the same
    ]
    seen = np.random.default_rng(1).random((8, VOCAB)) < 0.5
    params, table = table_of(samplings, seen, device)
    tokens, logprobs, kept, masses = draw(kernels, logits, table)
    temperatures = torch.tensor([s.temperature or 1.0 for s in samplings])
    expected = distribution(penalised(logits, params, seen), temperatures).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=2e-6)
    assert kept.tolist() == [0] * 8
    assert masses.tolist() == [1.0] * 8


FILTERS: list[dict[str, float]] = [
    {"top_k": 1, "temperature": 0.7},
    {"top_k": 5},
    {"top_k": 90, "temperature": 2.0},  # more than there are candidates
    {"top_p": 0.5, "temperature": 0.6},
    {"top_p": 0.97, "temperature": 2.0},
    {"top_p": 0.9, "temperature": 9.0},  # flat
    {"min_p": 0.2},
    {"min_p": 0.01, "temperature": 3.0},
    {"min_p": 0.02, "top_k": 60, "top_p": 0.8, "temperature": 2.5},
    {"top_k": 200, "top_p": 0.99, "repetition_penalty": 1.7},
    {"top_p": 0.8, "repetition_penalty": 1.3, "temperature": 1.7},
    {"top_k": 299, "temperature": 4.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_filters_keep_is_what_plain_torch_keeps(
    kernels: SamplingKernels, device: torch.device, dtype: torch.dtype
) -> None:
    logits = normal(len(FILTERS), dtype)
    seen = np.random.default_rng(2).random((len(FILTERS), VOCAB)) < 0.5
    params, table = table_of([ask(LogprobKind.PROCESSED, **each) for each in FILTERS], seen, device)
    tokens, logprobs, kept, masses = draw(kernels, logits, table)
    changed = penalised(logits, params, seen)
    num_kept, shares = measure_filters(changed, params)
    assert kept.tolist() == num_kept.tolist()
    torch.testing.assert_close(masses, shares.float(), atol=2e-6, rtol=2e-6)
    temperatures = torch.from_numpy(params["temperature"].copy())
    expected = distribution(changed, temperatures).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("spread", [0.0, 0.3, 6.0])
def test_kept_sets_by_definition_with_many_ties(kernels: SamplingKernels, device: torch.device, spread: float) -> None:
    logits = normal(len(FILTERS), torch.float32, spread).round()  # ties across every edge
    unseen = np.zeros((len(FILTERS), VOCAB), np.bool_)
    params, table = table_of([ask(LogprobKind.PROCESSED, **each) for each in FILTERS], unseen, device)
    _, _, kept, masses = draw(kernels, logits, table)
    for row in range(len(FILTERS)):
        weights = weights_of(logits[row], params[row])
        expected = kept_by(weights, params[row]) & (weights > 0)
        assert abs(int(kept[row]) - int(expected.sum())) <= 1, FILTERS[row]  # an edge of top_p is rounded
        assert abs(float(masses[row]) - weights[expected].sum() / weights.sum()) < 0.02


def test_a_row_without_finite_logits_keeps_nothing(kernels: SamplingKernels, device: torch.device) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    _, table = table_of([ask(LogprobKind.PROCESSED, top_p=0.5)], np.zeros((1, VOCAB), np.bool_), device)
    with np.errstate(over="ignore", invalid="ignore"):
        tokens, logprobs, kept, masses = draw(kernels, logits, table)
    assert tokens.tolist() == [0]
    assert logprobs.isfinite().all()
    assert kept.tolist() == [0]
    assert masses.tolist() == [1.0]


def test_log_probs_of_what_filters_keep(kernels: SamplingKernels, device: torch.device) -> None:
    """Rows that do not ask keep theirs, whatever is there: also no likeliest tokens that anybody has stored."""
    kept = torch.tensor([0, 2, 1, 7], dtype=torch.int32, device=device)
    masses = torch.tensor([1.0, 0.5, 1.0, 0.25], device=device)
    logprobs = torch.tensor([-1.0, -1.5, -0.5, -3.0], device=device)
    tops = torch.tensor([[torch.inf, -1, -9], [-1, -2, -3], [-0.5, -4, -5], [-2, -2.5, -3]], device=device)
    before, least = (logprobs.clone().cpu(), tops.clone().cpu()), torch.finfo(torch.float32).min
    kernels.renormalize(kept, masses, logprobs, tops)
    half, quarter = np.log(0.5), np.log(0.25)
    torch.testing.assert_close(logprobs.cpu(), before[0] - torch.tensor([0.0, half, 0.0, quarter], dtype=torch.float32))
    expected = [[torch.inf, -1, -9], [-1 - half, -2 - half, least], [-0.5, least, least]]
    torch.testing.assert_close(tops[:3].cpu(), torch.tensor(expected, dtype=torch.float32))
    torch.testing.assert_close(tops[3].cpu(), (before[1][3] - quarter).float())
    kernels.renormalize(kept[:0], masses[:0], logprobs[:0], tops[:0])
