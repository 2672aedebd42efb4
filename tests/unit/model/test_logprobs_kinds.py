"""Log-probs of the distribution that is sampled from, against the processors of transformers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from toka_async.messages import LogprobKind, TokenSampling
from toka_async.model.logprobs import distribution, keep_only_filtered, select_logprobs
from toka_async.model.sampling import Flag, make_params, measure_filters, sample

VOCAB = 5000


@dataclass(frozen=True)
class Case:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


CASES = [
    Case(0.7, top_k=20),
    Case(1.0, top_p=0.9),
    Case(1.6, top_k=300, top_p=0.95),
    Case(0.8, min_p=0.05),
    Case(2.5, top_p=0.99),  # keeps more than the first candidates
    Case(1.2, top_k=1),
]


def process(logits: Tensor, case: Case) -> Tensor:
    """log_softmax of what transformers samples from, float64 [s, vocab]."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(case.temperature)]
    warpers += [MinPLogitsWarper(case.min_p)] if case.min_p else []
    warpers += [TopKLogitsWarper(case.top_k)] if case.top_k else []
    warpers += [TopPLogitsWarper(case.top_p)] if case.top_p < 1 else []
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    return LogitsProcessorList(warpers)(ids, logits.double()).log_softmax(-1)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processed_log_probs_are_those_of_transformers_processors(case: Case) -> None:
    logits = 2 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(7))
    sampling = TokenSampling(
        temperature=case.temperature,
        top_k=case.top_k,
        top_p=case.top_p,
        min_p=case.min_p,
        num_logprobs=3,
        logprob_kind=LogprobKind.PROCESSED,
    )
    params = np.repeat(make_params(sampling), len(logits))
    tokens = sample(logits, params, np.random.default_rng(1).random(len(logits)))
    scaled = distribution(logits, torch.full((len(logits),), case.temperature))
    num_kept, masses = measure_filters(logits, params)
    found = keep_only_filtered(select_logprobs(scaled, tokens, params["num_logprobs"]), num_kept, masses)
    expected = process(logits, case)
    torch.testing.assert_close(found.chosen.double(), expected.gather(1, tokens[:, None])[:, 0], atol=1e-6, rtol=0)
    assert torch.equal(num_kept, expected.isfinite().sum(-1))
    # Over the kept tokens, the probabilities add up to 1.
    kept = expected.isfinite()
    total = torch.where(kept, scaled.double().exp(), 0).sum(-1) / masses
    torch.testing.assert_close(total, torch.ones(len(logits), dtype=torch.float64), atol=1e-6, rtol=0)
    has_top = torch.arange(3) < num_kept[:, None]
    assert (found.top[~has_top] == torch.finfo(torch.float32).min).all()
    torch.testing.assert_close(
        found.top[has_top].double(), expected.gather(1, found.top_ids)[has_top], atol=1e-6, rtol=0
    )


def test_a_greedy_row_counts_as_temperature_1() -> None:
    params = make_params(TokenSampling(temperature=0, top_p=0.5, num_logprobs=0, logprob_kind=LogprobKind.PROCESSED))
    assert params["flags"][0] & Flag.SCALED
    assert not params["flags"][0] & (Flag.RANDOM | Flag.KEPT)


def test_a_draw_of_the_likeliest_keeps_its_temperature_where_numbers_are_wanted() -> None:
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(2))
    logits[2] = 0
    params = np.repeat(make_params(TokenSampling(top_k=1, num_logprobs=0, logprob_kind=LogprobKind.PROCESSED)), 4)
    assert torch.equal(sample(logits, params, np.full(4, 0.999)), logits.argmax(-1))
    num_kept, masses = measure_filters(logits, params)
    assert num_kept.tolist() == [1] * 4
    torch.testing.assert_close(masses, logits.double().softmax(-1).amax(-1))
