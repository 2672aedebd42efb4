"""The stopping predictor on lengths whose distribution is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka_async.arrays import Int32
from toka_async.scheduler.stopping import (
    NUM_BINS,
    LengthEvidence,
    bins_of,
    hazards,
    mean_and_spread,
    quantile_lengths,
    survival,
)

NONE_RUNNING: Int32 = np.empty(0, np.int32)
MAX_TOKENS = 1000


def observed(lengths: Int32) -> LengthEvidence:
    evidence = LengthEvidence()
    evidence.add(bins_of(lengths, np.full_like(lengths, MAX_TOKENS)))
    return evidence


def filled(value: int, size: int) -> Int32:
    return np.full(size, value, dtype=np.int32)


def test_without_evidence_everything_reaches_max_tokens() -> None:
    curve = survival(LengthEvidence(), NONE_RUNNING, None)
    assert curve.tolist() == [1.0] * (NUM_BINS + 1)
    ranks = np.linspace(0.01, 0.99, 9)
    assert quantile_lengths(curve, filled(5, 9), filled(70, 9), ranks).tolist() == [70] * 9


def test_quantiles_follow_the_lengths_seen() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.exponential(200, 3000), MAX_TOKENS).astype(np.int32)
    curve = survival(observed(lengths), NONE_RUNNING, None)
    ranks = (np.arange(1000) + 0.5) / 1000
    guessed = quantile_lengths(curve, filled(0, 1000), filled(MAX_TOKENS, 1000), ranks)
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(guessed, share) == pytest.approx(np.quantile(lengths, share), rel=0.1, abs=6)
    assert guessed.mean() == pytest.approx(lengths.mean(), rel=0.05)
    mean, spread = mean_and_spread(curve)
    assert mean * MAX_TOKENS == pytest.approx(lengths.mean(), rel=0.05)
    assert spread * MAX_TOKENS == pytest.approx(lengths.std(), rel=0.08)


def test_what_a_sequence_produced_conditions_its_length() -> None:
    lengths = np.repeat(np.asarray([100, 800], np.int32), 500)
    curve = survival(observed(lengths), NONE_RUNNING, None)
    ranks = (np.arange(100) + 0.5) / 100
    young = quantile_lengths(curve, filled(0, 100), filled(MAX_TOKENS, 100), ranks)
    old = quantile_lengths(curve, filled(300, 100), filled(MAX_TOKENS, 100), ranks)
    assert young.mean() == pytest.approx(450, abs=15)
    assert old.mean() == pytest.approx(800, abs=12)


def test_running_sequences_count_as_survivors() -> None:
    """Short ones end first: from the ends alone all would seem short."""
    ended = observed(np.asarray([50] * 100, np.int32))
    running = filled(NUM_BINS // 2, 300)
    alone = survival(ended, NONE_RUNNING, None)[NUM_BINS // 4]
    both = survival(ended, running, None)[NUM_BINS // 4]
    assert alone < 0.1
    assert both == pytest.approx(0.75, abs=0.02)


def test_old_evidence_fades() -> None:
    evidence = observed(np.asarray([100] * 4000, np.int32))
    for _ in range(40):
        evidence.add(bins_of(filled(900, 500), filled(MAX_TOKENS, 500)))
    mean, _ = mean_and_spread(survival(evidence, NONE_RUNNING, None))
    assert mean == pytest.approx(0.9, abs=0.02)


def test_thin_evidence_falls_back_on_the_prior() -> None:
    everyone = hazards(observed(np.asarray([100] * 1000, np.int32)), NONE_RUNNING, None)
    of_group = LengthEvidence()
    fresh, _ = mean_and_spread(survival(of_group, NONE_RUNNING, everyone))
    assert fresh == pytest.approx(0.1, abs=0.01)
    of_group.add(bins_of(filled(700, 200), filled(MAX_TOKENS, 200)))
    learned, _ = mean_and_spread(survival(of_group, NONE_RUNNING, everyone))
    assert learned == pytest.approx(0.7, abs=0.03)


@given(
    lengths=st.lists(st.integers(1, 60), max_size=30),
    generated=st.integers(0, 59),
    rank=st.floats(0.001, 0.999),
    max_tokens=st.sampled_from([1, 2, 7, 60, 61, 5000]),
)
def test_a_guess_lies_between_what_is_there_and_the_limit(
    lengths: list[int], generated: int, rank: float, max_tokens: int
) -> None:
    evidence = LengthEvidence()
    if lengths:
        column = np.minimum(np.asarray(lengths, dtype=np.int32), max_tokens)
        evidence.add(bins_of(column, np.full_like(column, max_tokens)))
    generated = min(generated, max_tokens - 1)
    curve = survival(evidence, NONE_RUNNING, None)
    guess = int(quantile_lengths(curve, filled(generated, 1), filled(max_tokens, 1), np.asarray([rank]))[0])
    assert generated < guess <= max_tokens
