from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.sampling_rows import draw, kept_by, penalised, rejected_until_kept, table_of, uniforms_of, weights_of
from toka_async.kernels.sampling.kernels import SamplingKernels
from toka_async.messages import TokenSampling
from toka_async.model.sampling import sample

# Vocabulary, chunk, candidates: fewer lines than candidates, and more.
SHAPES = [(300, 128, 8), (1000, 512, 8)]


def make(shape: tuple[int, int, int], device: torch.device) -> SamplingKernels:
    vocab, chunk, candidates = shape
    return SamplingKernels(vocab, 16, device, chunk=chunk, num_candidates=candidates)


def normal(rows: int, vocab: int, spread: float, seed: int = 0) -> Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed + vocab))


def unseen(rows: int, vocab: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    return np.zeros((rows, vocab), dtype=np.bool_)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_candidates_settle_what_they_hold(shape: tuple[int, int, int], device: torch.device) -> None:
    samplings = [
        TokenSampling(top_k=5),
        TokenSampling(top_k=8, top_p=0.8, temperature=2.0),
        TokenSampling(top_p=0.7),
        TokenSampling(min_p=0.5),
        TokenSampling(top_k=2, min_p=0.001, temperature=3.0),
        TokenSampling(min_p=0.3, top_p=0.6),
        TokenSampling(top_k=7, top_p=0.9, min_p=0.01, temperature=0.4),
        TokenSampling(top_p=1e-9),
    ]
    logits = normal(8, shape[0], 4.0)
    params, table = table_of(samplings, unseen(8, shape[0]), device)
    tokens, _ = draw(make(shape, device), logits, table)
    assert tokens.tolist() == sample(logits.clone(), params, uniforms_of(8)).tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_candidates_break_ties_by_lowest_id(shape: tuple[int, int, int], device: torch.device) -> None:
    """Whole numbers as logits: dozens of ties at every bound, many more than there is room for."""
    samplings = [
        TokenSampling(top_k=5),
        TokenSampling(top_k=8, top_p=0.5),
        TokenSampling(top_k=3, min_p=0.9),
        TokenSampling(top_p=0.002),
        TokenSampling(top_k=6, top_p=0.99, temperature=4.0),
        TokenSampling(top_k=8),
    ]
    logits = normal(6, shape[0], 0.7).round()
    logits[5] = -0.0
    logits[5, 64:] = 0.0
    params, table = table_of(samplings, unseen(6, shape[0]), device)
    tokens, _ = draw(make(shape, device), logits, table)
    assert tokens.tolist() == sample(logits.clone(), params, uniforms_of(6)).tolist()


def test_likely_tokens_side_by_side(device: torch.device) -> None:
    """One line holds more tokens above the others' maxima than there is room for."""
    logits = normal(4, 1000, 0.1)
    logits[:, 128:190] += 3 + normal(4, 62, 0.5)
    samplings = [
        TokenSampling(top_k=8),
        TokenSampling(top_k=3),
        TokenSampling(top_k=8, top_p=0.5),
        TokenSampling(min_p=0.6),
    ]
    params, table = table_of(samplings, unseen(4, 1000), device)
    tokens, _ = draw(make(SHAPES[1], device), logits, table)
    assert tokens.tolist() == sample(logits.clone(), params, uniforms_of(4)).tolist()


@pytest.mark.parametrize(
    ("fields", "tied"),
    [
        ({"top_p": 0.8, "min_p": 0.02}, False),
        ({"min_p": 0.05, "temperature": 1.3}, True),
        ({"top_k": 40}, True),
        ({"top_k": 200, "top_p": 0.6}, False),
        ({"top_k": 30, "top_p": 0.9, "min_p": 0.05}, False),
        ({"top_k": 5000, "top_p": 0.3}, True),
    ],
    ids=str,
)
def test_rejection_proposes_until_the_filters_keep(fields: dict[str, Any], tied: bool, device: torch.device) -> None:
    """Where candidates settle nothing: every proposal is the one that the algorithm makes."""
    shape = SHAPES[1]
    logits = normal(2, shape[0], 1.2)
    logits = (2 * logits).round() / 2 if tied else logits
    params, table = table_of([TokenSampling(**fields)] * 2, unseen(2, shape[0]), device)
    tokens, _ = draw(make(shape, device), logits, table)
    everything = np.ones(shape[0], dtype=np.bool_)
    for row in range(2):
        weights = weights_of(logits[row], params[row])
        covered = None if params[row]["top_k"] else everything
        assert int(tokens[row]) == rejected_until_kept(weights, params[row], row, covered)[0]


@pytest.mark.parametrize(
    ("shape", "top_p"), [(SHAPES[0], 0.6), (SHAPES[1], 0.95), (SHAPES[1], 0.6), (SHAPES[1], 0.2)], ids=str
)
def test_flat_rows_are_drawn_within_the_bounds(shape: tuple[int, int, int], top_p: float, device: torch.device) -> None:
    """The first proposal comes from the tokens above the lower bound, and nearly all of them stand."""
    kernels = make(shape, device)
    logits = normal(4, shape[0], 0.5)
    params, table = table_of([TokenSampling(top_p=top_p)] * 4, unseen(4, shape[0]), device)
    tokens, _ = draw(kernels, logits, table)
    upper, lower = kernels.bounds[:4].cpu().unbind(1)
    num_proposals = 0
    for row in range(4):
        weights = weights_of(logits[row], params[row])
        kept = kept_by(weights, params[row])
        covered = (logits[row] >= lower[row]).numpy()
        assert covered[kept].all()
        assert covered.sum() < kept.sum() + 0.1 * shape[0]
        assert kept[(logits[row] >= upper[row]).numpy()].all()
        token, num = rejected_until_kept(weights, params[row], row, covered)
        assert int(tokens[row]) == token
        num_proposals += num
    assert num_proposals <= 5


def test_wrong_bounds_change_no_distribution(device: torch.device) -> None:
    """The pilot sees one line in two; the likeliest tokens lie in the others."""
    vocab = 64 * 130
    kernels = SamplingKernels(vocab, 4, device, chunk=1024, num_candidates=8)
    seen_by_pilot = torch.arange(64) * 130 // 64
    logits = normal(4, vocab, 0.3).reshape(4, 130, 64)
    unlike = torch.ones(130, dtype=torch.bool)
    unlike[seen_by_pilot] = False
    logits[:2, unlike] += 2.0  # the nucleus ends above the bounds
    logits[2:, unlike] -= 2.0  # and below them
    logits = logits.reshape(4, vocab)
    params, table = table_of([TokenSampling(top_p=0.6)] * 4, unseen(4, vocab), device)
    tokens, _ = draw(kernels, logits, table)
    lower = kernels.bounds[:4, 1].cpu()
    assert lower.isfinite().all()
    for row in range(4):
        weights = weights_of(logits[row], params[row])
        covered = (logits[row] >= lower[row]).numpy()
        enough = weights[covered].sum() >= 0.6 * weights.sum()
        assert enough == (row < 2)
        assert int(tokens[row]) == rejected_until_kept(weights, params[row], row, covered if enough else None)[0]


@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_draw_passes_the_filters(device: torch.device, data: st.DataObject) -> None:
    vocab = SHAPES[0][0]
    sampling = TokenSampling(
        temperature=data.draw(st.sampled_from([0.3, 1.0, 2.5])),
        top_p=data.draw(st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0])),
        top_k=data.draw(st.sampled_from([0, 0, 3, 8, 9, 100, 400])),
        min_p=data.draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.7, 1.5])),
    )
    seed = data.draw(st.integers(0, 1000))
    logits = normal(1, vocab, data.draw(st.sampled_from([0.2, 1.0, 5.0])), seed)
    if data.draw(st.booleans()):
        logits = logits.round()
    seen = np.random.default_rng(seed).random((1, vocab)) < 0.5
    params, table = table_of([sampling], seen, device)
    tokens, _ = draw(make(SHAPES[0], device), logits, table)
    # One unit of rounding at the bound: a little more is kept.
    lenient = params[0].copy()
    lenient["top_p"] += 1e-6
    lenient["min_p"] *= 1 - 1e-6
    assert kept_by(weights_of(penalised(logits, params, seen)[0], lenient), lenient)[int(tokens[0])]
