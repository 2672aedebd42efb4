from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from toka_async.arrays import i32_column
from toka_async.messages import TokenSampling
from toka_async.model.rng import Float64, draw_uniforms
from toka_async.model.sampling import Flag, clean, make_params, sample, sample_alone
from toka_async.openai.generation import LEAST_TEMPERATURE

FILTERS = [
    TokenSampling(temperature=1.0),
    TokenSampling(temperature=0.5),
    TokenSampling(temperature=1.7),
    TokenSampling(temperature=1.0, top_k=5),
    TokenSampling(temperature=1.2, top_k=100),
    TokenSampling(temperature=1.0, top_p=0.5),
    TokenSampling(temperature=1.0, top_p=0.99),
    TokenSampling(temperature=0.9, min_p=0.1),
    TokenSampling(temperature=1.1, min_p=0.001),
    TokenSampling(temperature=0.8, top_k=40, top_p=0.9),
    TokenSampling(temperature=1.5, top_k=90, top_p=0.95, min_p=0.02),
    TokenSampling(temperature=1.5, top_p=0.7, min_p=0.0001),
]
SIZES = [(12, 1.0), (300, 1.0), (1500, 0.3), (4500, 2.0)]  # vocabulary, spread of its logits


def _name(value: object) -> str:
    """A short test id: the fields that are not at their defaults."""
    if not isinstance(value, TokenSampling):
        return str(value)
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    changed = {name: field for name, field in fields.items() if field != getattr(TokenSampling(), name)}
    return (
        ",".join(f"{name}={field}" for name, field in changed.items() if not isinstance(field, memoryview)) or "plain"
    )


def _logits(vocab: int, spread: float) -> Tensor:
    return spread * torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab))


def _exact(logits: Tensor, sampling: TokenSampling) -> npt.NDArray[np.float64]:
    """The distribution by definition, one filter after the other, float64 [vocab]."""
    p = (logits[0].double() / sampling.temperature).softmax(-1).numpy()
    p = np.where(p >= sampling.min_p * p.max(), p, 0)
    by_weight = np.argsort(-p, kind="stable")
    if sampling.top_k:
        p[by_weight[sampling.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[by_weight]) - p[by_weight]
    p[by_weight[before >= sampling.top_p]] = 0
    result: npt.NDArray[np.float64] = p / p.sum()
    return result


def _draw(logits: Tensor, sampling: TokenSampling, uniform: Float64) -> npt.NDArray[np.int64]:
    """One token for each number, of the same logits [1, vocab]."""
    params = make_params(sampling)
    parts = [
        sample(logits.expand(len(part), -1).clone(), np.repeat(params, len(part)), part).numpy()
        for part in np.array_split(uniform, max(1, uniform.size * logits.shape[1] // 1_000_000))
    ]
    return np.concatenate(parts)


@pytest.mark.parametrize(("vocab", "spread"), SIZES)
@pytest.mark.parametrize("sampling", FILTERS, ids=_name)
def test_shares_of_the_unit_interval_are_the_exact_distribution(
    vocab: int, spread: float, sampling: TokenSampling
) -> None:
    """An even grid of numbers hits every token as often as its probability says, within one point of the grid."""
    logits = _logits(vocab, spread)
    expected = _exact(logits, sampling)
    num = 400
    tokens = _draw(logits, sampling, (np.arange(num) + 0.5) / num)
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[expected == 0].sum() == 0
    assert np.abs(counts - num * expected).max() <= 1.001


@pytest.mark.parametrize("sampling", FILTERS, ids=_name)
def test_chi_square(sampling: TokenSampling) -> None:
    logits = _logits(100, 1.5)
    expected = _exact(logits, sampling)
    num = 8000
    tokens = _draw(logits, sampling, draw_uniforms(np.arange(num), np.full(num, 3)))
    counts = np.bincount(tokens, minlength=100)
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (num * expected < 5)
    observed = np.append(counts[num * expected >= 5], counts[rare].sum())
    wanted = np.append(num * expected[num * expected >= 5], max(num * expected[rare].sum(), 1e-9))
    degrees = observed.size - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    assert chi_square < degrees + 4.5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("sampling", FILTERS[3:], ids=_name)
def test_filters_keep_what_those_of_transformers_keep(sampling: TokenSampling) -> None:
    """min_p first, as here; transformers' own order differs, and is the same when one filter is on."""
    logits = _logits(300, 1.0)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    no_ids = torch.LongTensor([[0]])
    expected = warpers(no_ids, torch.FloatTensor(logits.tolist()))[0].softmax(-1).double().numpy()
    tokens = _draw(logits, sampling, (np.arange(2000) + 0.5) / 2000)
    counts = np.bincount(tokens, minlength=300)
    assert counts[expected == 0].sum() == 0
    assert np.abs(counts - 2000 * expected).max() <= 1.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_largest_and_the_lowest_id_of_ties(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0], [5.0, 5.0, 5.0, 5.0], [-3.0, -2.0, -1.0, -0.5]], dtype=dtype)
    for sampling in (
        TokenSampling(temperature=0),
        TokenSampling(temperature=0, top_k=3, top_p=0.5),
        TokenSampling(top_k=1),
    ):
        params = np.repeat(make_params(sampling), 3)
        assert sample(logits.clone(), params, np.full(3, 0.99)).tolist() == [1, 0, 3]


@pytest.mark.parametrize("vocab", [10, 100, 1500, 5000])
def test_filters_break_ties_by_lowest_id(vocab: int) -> None:
    logits = torch.zeros(1, vocab)
    logits[0, vocab // 2] = 1.0
    grid = (np.arange(50) + 0.5) / 50
    assert set(_draw(logits, TokenSampling(top_k=3), grid).tolist()) == {vocab // 2, 0, 1}
    assert set(_draw(torch.zeros(1, vocab), TokenSampling(top_p=1e-9), grid).tolist()) == {0}
    assert set(_draw(torch.zeros(1, vocab), TokenSampling(top_p=2.5 / vocab), grid).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("vocab", [7, 100, 5000])
@pytest.mark.parametrize(
    "sampling",
    [
        TokenSampling(temperature=0),
        TokenSampling(),
        TokenSampling(top_p=0.9),
        TokenSampling(top_k=5),
        TokenSampling(min_p=0.1),
    ],
    ids=_name,
)
def test_logits_that_are_not_numbers(vocab: int, sampling: TokenSampling) -> None:
    logits = torch.full((5, vocab), -torch.inf)
    logits[1] = torch.nan
    logits[2, 3] = 0.0  # the only token
    logits[3, 4] = torch.inf
    logits[4] = torch.nan
    logits[4, 6] = -5.0
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        tokens = sample(clean(logits.clone()), np.repeat(make_params(sampling), 5), np.full(5, uniform))
        assert tokens.tolist() == [0, 0, 3, 4, 6]


@pytest.mark.parametrize("vocab", [50, 5000])
def test_extreme_temperatures(vocab: int) -> None:
    logits = _logits(vocab, 3.0)
    largest = int(logits.argmax())
    uniform = draw_uniforms(np.arange(100), np.zeros(100, dtype=np.int64))
    assert set(_draw(logits, TokenSampling(temperature=1e-30), uniform).tolist()) == {largest}
    assert set(_draw(logits, TokenSampling(temperature=1e-4, top_p=0.9), uniform).tolist()) == {largest}
    hot = _draw(logits, TokenSampling(temperature=1e30), (np.arange(vocab) + 0.5) / vocab)
    assert np.array_equal(hot, np.arange(vocab))


@dataclass(frozen=True)
class _Row:
    seed: int
    spread: float
    sampling: TokenSampling


ROWS = st.builds(
    _Row,
    st.integers(0, 2**62),
    st.sampled_from([0.01, 1.0, 8.0]),
    st.sampled_from([*FILTERS, TokenSampling(temperature=0)]),
)


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=12), vocab=st.sampled_from([9, 200, 1300, 4500]))
def test_a_row_alone_and_among_others_samples_the_same(rows: list[_Row], vocab: int) -> None:
    logits = torch.cat(
        [row.spread * torch.randn(1, vocab, generator=torch.Generator().manual_seed(row.seed)) for row in rows]
    )
    params = np.concatenate([make_params(row.sampling) for row in rows])
    uniform = draw_uniforms(np.array([row.seed for row in rows]), np.zeros(len(rows), dtype=np.int64))
    together = sample(logits.clone(), params, uniform).tolist()
    alone = [int(sample(logits[i : i + 1].clone(), params[i : i + 1], uniform[i : i + 1])) for i in range(len(rows))]
    assert together == alone


def test_low_precision_logits_are_sampled_in_float32() -> None:
    logits = _logits(5000, 1.0).bfloat16()
    grid = (np.arange(500) + 0.5) / 500
    for sampling in (TokenSampling(), TokenSampling(top_p=0.8)):
        assert np.array_equal(_draw(logits, sampling, grid), _draw(logits.float(), sampling, grid))


@pytest.mark.parametrize(
    ("sampling", "flags"),
    [
        (TokenSampling(temperature=0, top_p=0.5), 0),
        (TokenSampling(top_k=1), 0),
        (TokenSampling(), Flag.RANDOM),
        (TokenSampling(top_p=0.9), Flag.RANDOM | Flag.FILTERED),
        (TokenSampling(temperature=0, repetition_penalty=1.1), Flag.REPETITION),
        (TokenSampling(temperature=0, frequency_penalty=-0.1), Flag.COUNTED),
        (TokenSampling(temperature=0, min_tokens=3), 0),
        (TokenSampling(temperature=0, min_tokens=3, end_ids=i32_column([2])), Flag.MIN_TOKENS),
        (TokenSampling(temperature=0, bias_ids=i32_column([2])), Flag.BIASED),
        (TokenSampling(temperature=0, num_logprobs=0), Flag.LOGPROBS),
    ],
    ids=_name,
)
def test_rows_pay_only_for_what_they_ask(sampling: TokenSampling, flags: int) -> None:
    assert make_params(sampling)["flags"].tolist() == [flags]


@pytest.mark.parametrize("filters", [{}, {"top_p": 1e-46}, {"top_k": 5, "min_p": 1e-46}])
def test_the_lowest_temperature_is_as_good_as_greedy(filters: dict[str, Any]) -> None:
    logits = _logits(300, 1.0)
    drawn = _draw(logits, TokenSampling(temperature=LEAST_TEMPERATURE, **filters), np.linspace(0, 0.999, 50))
    assert set(drawn.tolist()) == {int(logits.argmax())}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_rows=st.integers(1, 9), size=st.sampled_from([*SIZES, (40_000, 1.5)]))
def test_a_row_draws_alone_what_it_draws_among_others(seed: int, num_rows: int, size: tuple[int, float]) -> None:
    generator, (vocab, spread) = torch.Generator().manual_seed(seed), size
    logits = torch.randn(num_rows, vocab, generator=generator) * spread
    kinds = [make_params(FILTERS[(seed + row) % len(FILTERS)]) for row in range(num_rows)]
    params, uniform = np.concatenate(kinds), np.random.default_rng(seed).random(num_rows)
    together = sample(logits, params, uniform)
    assert torch.equal(sample_alone(logits, params, uniform), together)
