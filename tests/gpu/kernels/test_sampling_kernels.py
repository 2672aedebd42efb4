"""The sampling kernels at the size of a real vocabulary: distributions, agreement with plain torch, CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.sampling_rows import INDEX, draw, kept_by, name_of, penalised, table_of, uniforms_of, weights_of
from toka_async.kernels.sampling.kernels import SamplingKernels
from toka_async.messages import TokenSampling
from toka_async.model.logprobs import distribution
from toka_async.model.sampling import sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
VOCAB = 128256
DEVICE = torch.device("cuda")
# Spread of the logits: flat (a nucleus of ten thousands), between, and peaked (a handful).
CASES = [
    (0.9, TokenSampling()),
    (0.9, TokenSampling(temperature=0.6, top_p=0.9)),
    (1.5, TokenSampling(top_p=0.5)),
    (2.5, TokenSampling(top_p=0.9)),
    (4.0, TokenSampling(temperature=0.8, top_p=0.95)),
    (0.9, TokenSampling(top_k=20, top_p=0.8, repetition_penalty=1.05)),
    (4.0, TokenSampling(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)),
    (0.9, TokenSampling(min_p=0.02)),
    (2.5, TokenSampling(min_p=0.01, top_p=0.9)),
    (0.9, TokenSampling(top_k=500, top_p=0.9)),
    (1.5, TokenSampling(top_p=0.9, repetition_penalty=1.3)),
]


@pytest.fixture(scope="module")
def kernels() -> SamplingKernels:
    return SamplingKernels(VOCAB, 8192, DEVICE)


def normal(rows: int, spread: float) -> Tensor:
    return (spread * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(7))).bfloat16()


def seen_by(rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    return np.repeat(np.random.default_rng(0).random((1, VOCAB)) < 0.1, rows, axis=0)


@pytest.mark.parametrize(("spread", "sampling"), CASES, ids=name_of)
def test_chi_square(kernels: SamplingKernels, spread: float, sampling: TokenSampling) -> None:
    """8,192 draws of one distribution, counted in groups of neighbouring ids of about the same probability."""
    num = 8192
    logits = normal(1, spread)
    params, table = table_of([sampling] * num, seen_by(num), DEVICE)
    tokens, _ = draw(kernels, logits.to(DEVICE).repeat(num, 1), table)
    weights = weights_of(penalised(logits, params[:1], seen_by(1))[0], params[0])
    lenient = params[0].copy()  # one unit of rounding at the bound: a little more is kept
    lenient["top_p"] += 1e-6
    lenient["min_p"] *= 1 - 1e-6
    assert kept_by(weights, lenient)[tokens.numpy()].all()
    p = np.where(kept_by(weights, params[0]), weights, 0)
    p /= p.sum()
    group = np.floor((np.cumsum(p) - p / 2) * 100).astype(np.int64)
    expected = num * np.bincount(group, p)
    observed = np.bincount(group[tokens.numpy()], minlength=expected.size)
    groups = expected > 0
    degrees = int(groups.sum()) - 1
    chi_square = float(((observed - expected)[groups] ** 2 / expected[groups]).sum())
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 1e-9


def test_settled_rows_equal_plain_torch(kernels: SamplingKernels) -> None:
    num = 256
    kinds = [
        TokenSampling(temperature=0, num_logprobs=0),
        TokenSampling(num_logprobs=0),
        TokenSampling(temperature=0.6, top_p=0.9, num_logprobs=0),
        TokenSampling(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, num_logprobs=0),
        TokenSampling(temperature=0.7, top_k=64, min_p=0.01, num_logprobs=0),
    ]
    logits = normal(num, 4.0)
    params, table = table_of([kinds[i % len(kinds)] for i in range(num)], seen_by(num), DEVICE)
    tokens, logprobs = draw(kernels, logits, table)
    expected = sample(penalised(logits, params, seen_by(num)), params, uniforms_of(num))
    # A draw right at the border of two tokens may fall on either.
    assert (tokens == expected).float().mean() > 0.99
    torch.testing.assert_close(logprobs, distribution(logits).gather(1, tokens[:, None])[:, 0], atol=1e-4, rtol=1e-5)


def test_in_a_graph(kernels: SamplingKernels) -> None:
    """A replay draws what the calls draw, with what is then in the table and in its inputs."""
    num = 64
    samplings = [
        TokenSampling(),
        TokenSampling(top_p=0.9),
        TokenSampling(top_k=20, repetition_penalty=1.1),
        TokenSampling(min_p=0.05),
    ]
    _, table = table_of([samplings[i % 4] for i in range(num)], seen_by(num), DEVICE)
    before = table.seen.clone()
    slots = torch.arange(num, device=DEVICE)
    contexts = torch.full((num,), 7, dtype=torch.int32, device=DEVICE)
    logits = normal(num, 2.0).to(DEVICE)
    kernels.draw(logits, slots, contexts, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn, _ = kernels.draw(logits, slots, contexts, table)
    logits.copy_(normal(2 * num, 2.0)[num:])
    contexts.fill_(7 + INDEX)
    slots.copy_(slots.flip(0).clone())
    table.seen.copy_(before)
    graph.replay()
    table.seen.copy_(before)
    assert torch.equal(drawn, kernels.draw(logits, slots, contexts, table)[0])
