from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.cases.sampling_rows import draw, penalised, table_of, uniforms_of
from toka_async.kernels.sampling.kernels import SamplingKernels
from toka_async.kernels.sampling.row import random_bits, uniform_of
from toka_async.messages import TokenSampling
from toka_async.model.logprobs import distribution
from toka_async.model.rng import draw_uniforms
from toka_async.model.sampling import clean, sample

VOCAB, CHUNK, CANDIDATES = 300, 128, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@triton.jit
def _store_uniforms(seeds_at, indices_at, output_at):  # type: ignore[no-untyped-def]
    at = tl.program_id(0)
    index = tl.load(indices_at + at).to(tl.uint64)
    tl.store(output_at + at, uniform_of(random_bits(tl.load(seeds_at + at), index)))


@pytest.fixture
def kernels(device: torch.device) -> SamplingKernels:
    return SamplingKernels(VOCAB, 16, device, chunk=CHUNK, num_candidates=CANDIDATES)


def normal(rows: int, dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> Tensor:
    return (2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))).to(dtype)


def unseen(rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    return np.zeros((rows, VOCAB), dtype=np.bool_)


def test_uniform_numbers_are_those_of_the_streams(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    seeds = np.append(rng.integers(-(2**63), 2**63 - 1, 60), [0, 1, -1, 2**63 - 1, -(2**63)])
    indices = np.append(rng.integers(0, 2**31, 60), [0, 1, 2, 3, 4])
    output = torch.zeros(seeds.size, dtype=torch.float64, device=device)
    _store_uniforms[(seeds.size,)](torch.from_numpy(seeds).to(device), torch.from_numpy(indices).to(device), output)
    assert output.cpu().numpy().tobytes() == draw_uniforms(seeds, indices).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_takes_the_largest_and_the_lowest_id_of_ties(
    kernels: SamplingKernels, device: torch.device, dtype: torch.dtype
) -> None:
    logits = torch.cat([normal(3, dtype), torch.zeros(2, VOCAB, dtype=dtype)])
    logits[1, [77, 140, 290]] = 9.0
    logits[4, 130:] = 1.0
    greedy = [TokenSampling(temperature=0), TokenSampling(top_k=1), TokenSampling(temperature=0, top_p=0.5)]
    _, table = table_of([*greedy, *greedy[:2]], unseen(5), device)
    tokens, _ = draw(kernels, logits, table)
    assert tokens.tolist() == [int(logits[0].argmax()), 77, int(logits[2].argmax()), 0, 130]
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_draws_are_those_of_the_reference(
    kernels: SamplingKernels, device: torch.device, dtype: torch.dtype
) -> None:
    logits = normal(8, dtype)
    params, table = table_of([TokenSampling(temperature=t) for t in (1.0, 0.6, 1.7, 0.05) * 2], unseen(8), device)
    tokens, logprobs = draw(kernels, logits, table)
    assert tokens.tolist() == sample(logits.clone(), params, uniforms_of(8)).tolist()
    assert not logprobs.any()


def test_a_draw_depends_on_its_own_slot_only(kernels: SamplingKernels, device: torch.device) -> None:
    logits = normal(4)
    samplings = [
        TokenSampling(),
        TokenSampling(top_k=3),
        TokenSampling(temperature=0),
        TokenSampling(temperature=0.5),
    ]
    _, table = table_of(samplings, unseen(4), device)
    together, _ = draw(kernels, logits, table)
    order = [2, 0, 3, 1]
    assert draw(kernels, logits[order], table, slots=order)[0].tolist() == together[order].tolist()
    assert draw(kernels, logits[3:], table, slots=[3])[0].tolist() == together[3:].tolist()
    assert draw(kernels, logits[:0], table)[0].shape == (0,)


def test_repetition_penalty_reads_and_writes_seen_bits(kernels: SamplingKernels, device: torch.device) -> None:
    logits = normal(6)
    samplings = [
        TokenSampling(temperature=0, repetition_penalty=4.0),
        TokenSampling(repetition_penalty=1.3),
        TokenSampling(repetition_penalty=0.8, top_k=3),
        TokenSampling(repetition_penalty=1.3, top_p=0.7),
        TokenSampling(),  # has no penalty: neither reads nor writes
        TokenSampling(temperature=0.5, repetition_penalty=1.3),
    ]
    seen = np.random.default_rng(1).random((6, VOCAB)) < 0.5
    seen[0, int(logits[0].argmax())] = True
    params, table = table_of(samplings, seen, device)
    before = table.seen.cpu().clone()
    tokens, _ = draw(kernels, logits, table)
    changed = penalised(logits, params, seen)
    assert int(tokens[0]) == int(changed[0].argmax()) != int(logits[0].argmax())
    assert tokens[[0, 1, 2, 4, 5]].tolist() == sample(changed, params, uniforms_of(6))[[0, 1, 2, 4, 5]].tolist()
    words = before.clone()
    for row in (0, 1, 2, 3, 5):
        words[row, int(tokens[row]) // 32] |= torch.tensor(1 << int(tokens[row]) % 32).to(torch.int32)
    assert torch.equal(table.seen.cpu(), words)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probs_are_of_the_raw_distribution(
    kernels: SamplingKernels, device: torch.device, dtype: torch.dtype
) -> None:
    logits = normal(7, dtype)
    samplings = [
        TokenSampling(num_logprobs=0),
        TokenSampling(temperature=0, num_logprobs=0),
        TokenSampling(temperature=0.3, num_logprobs=0),
        TokenSampling(repetition_penalty=3.0, num_logprobs=0),
        TokenSampling(temperature=0.7, top_p=0.5, num_logprobs=0),
        TokenSampling(temperature=0, repetition_penalty=3.0, num_logprobs=0),
        TokenSampling(),
    ]
    seen = np.random.default_rng(1).random((7, VOCAB)) < 0.5
    _, table = table_of(samplings, seen, device)
    tokens, logprobs = draw(kernels, logits, table)
    expected = distribution(logits).gather(1, tokens[:, None])[:, 0]
    expected[6] = 0
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_that_are_none(kernels: SamplingKernels, device: torch.device, dtype: torch.dtype) -> None:
    logits = normal(7, dtype)
    logits[0, ::2] = torch.nan
    logits[1, ::3] = -torch.inf
    logits[2, [70, 200]] = torch.inf
    logits[3] = torch.nan
    logits[4] = -torch.inf
    logits[5] = -torch.inf
    logits[5, 299] = -3.0
    logits[6] = -torch.inf
    samplings = [
        TokenSampling(top_k=5, num_logprobs=0),
        TokenSampling(top_p=0.9, num_logprobs=0),
        TokenSampling(num_logprobs=0),
        TokenSampling(temperature=0, num_logprobs=0),
        TokenSampling(num_logprobs=0),
        TokenSampling(top_p=0.1, min_p=0.1, num_logprobs=0),
        TokenSampling(top_k=3, top_p=0.5, num_logprobs=0),
    ]
    params, table = table_of(samplings, unseen(7), device)
    with np.errstate(over="ignore", invalid="ignore"):
        tokens, logprobs = draw(kernels, logits, table)
    expected = clean(logits.clone())
    fixed = [0, 2, 3, 4, 5, 6]
    assert tokens[fixed].tolist() == sample(expected, params, uniforms_of(7))[fixed].tolist()
    assert tokens[3:].tolist() == [0, 0, 299, 0]
    assert int(tokens[1]) % 3 > 0
    values = distribution(expected).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, values, atol=2e-6, rtol=2e-6)


def test_tiny_and_huge_temperatures(kernels: SamplingKernels, device: torch.device) -> None:
    logits = normal(4)
    samplings = [TokenSampling(temperature=t) for t in (1e-40, 1e-5, 1e30, 1e38)]
    params, table = table_of(samplings, unseen(4), device)
    tokens, _ = draw(kernels, logits, table)
    assert tokens[:2].tolist() == logits[:2].argmax(-1).tolist()
    assert tokens[2:].tolist() == sample(logits.clone(), params, uniforms_of(4))[2:].tolist()


def test_default_sizes(device: torch.device) -> None:
    """Several chunks of 4,096, the last one short, and rows whose stride is not the vocabulary."""
    vocab = 9001
    kernels = SamplingKernels(vocab, 4, device)
    logits = normal(4, torch.bfloat16, vocab + 39)[:, :vocab]
    samplings = [
        TokenSampling(num_logprobs=0),
        TokenSampling(temperature=0),
        TokenSampling(top_k=20, top_p=0.8),
        TokenSampling(min_p=0.3),
    ]
    params, table = table_of(samplings, np.zeros((4, vocab), dtype=np.bool_), device)
    tokens, logprobs = draw(kernels, logits, table)
    assert tokens.tolist() == sample(logits.clone(), params, uniforms_of(4)).tolist()
    assert float(logprobs[0]) == pytest.approx(float(distribution(logits)[0, tokens[0]]), abs=1e-5)
