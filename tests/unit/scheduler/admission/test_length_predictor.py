from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka_async.arrays import Int32
from toka_async.scheduler.admission.length_predictor import EVERYONE, MAX_GROUPS, NUM_BINS, LengthPredictor

NONE: Int32 = np.empty(0, np.int32)
MAX_TOKENS = 1000
RANKS = (np.arange(1000) + 0.5) / 1000


def filled(value: int, size: int) -> Int32:
    return np.full(size, value, dtype=np.int32)


def observe(predictor: LengthPredictor, lengths: Int32, group: int = EVERYONE) -> None:
    limit = filled(MAX_TOKENS, lengths.size)
    predictor.observe(filled(group, lengths.size), lengths, limit, lengths == MAX_TOKENS)


def learned(lengths: Int32) -> LengthPredictor:
    predictor = LengthPredictor()
    observe(predictor, lengths)
    predictor.update(NONE, NONE, NONE)
    return predictor


def guesses(predictor: LengthPredictor, generated: int = 0, group: int = EVERYONE) -> Int32:
    size = RANKS.size
    return predictor.predict_lengths(filled(group, size), filled(generated, size), filled(MAX_TOKENS, size), RANKS)


def test_without_evidence_most_end_in_the_first_half() -> None:
    """Else the first sequences would have the cache to themselves; before and after an update alike."""
    fresh, updated = LengthPredictor(), LengthPredictor()
    updated.update(NONE, NONE, NONE)
    for predictor in (fresh, updated):
        guessed = guesses(predictor)
        assert guessed.mean() == pytest.approx(MAX_TOKENS / 4, rel=0.05)
        assert 0.01 < (guessed == MAX_TOKENS).mean() < 0.03


def test_running_sequences_alone_correct_the_first_guess() -> None:
    predictor = LengthPredictor()
    predictor.update(filled(EVERYONE, 500), filled(600, 500), filled(MAX_TOKENS, 500))
    assert np.quantile(guesses(predictor), 0.05) > 550


def test_a_group_that_ends_late_is_expected_to_go_on() -> None:
    """All of its samples are beyond where half of the others ended: what is to come is slower, too."""
    rng = np.random.default_rng(1)
    predictor = learned(np.clip(rng.exponential(200, 4000), 1, MAX_TOKENS).astype(np.int32))
    group = predictor.open_group()
    predictor.update(filled(group, 200), filled(200, 200), filled(MAX_TOKENS, 200))
    slow = guesses(predictor, generated=200, group=group).mean()
    assert slow > 1.3 * guesses(predictor, generated=200).mean()


def test_quantiles_follow_the_lengths_seen() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.exponential(200, 3000), 1, MAX_TOKENS).astype(np.int32)
    predictor = learned(lengths)
    guessed = guesses(predictor)
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(guessed, share) == pytest.approx(np.quantile(lengths, share), rel=0.1, abs=6)
    assert guessed.mean() == pytest.approx(lengths.mean(), rel=0.05)
    mean, spread = predictor.mean_and_spread(EVERYONE)
    assert mean * MAX_TOKENS == pytest.approx(lengths.mean(), rel=0.05)
    assert spread * MAX_TOKENS == pytest.approx(lengths.std(), rel=0.08)


def test_what_a_sequence_produced_conditions_its_length() -> None:
    predictor = learned(np.repeat(np.asarray([100, 800], np.int32), 500))
    assert guesses(predictor).mean() == pytest.approx(450, abs=15)
    assert guesses(predictor, generated=300).mean() == pytest.approx(800, abs=12)


def test_running_sequences_count_as_survivors() -> None:
    """Short ones end first: from the ends alone all would seem short."""
    predictor = learned(filled(50, 100))
    alone = predictor.curves[EVERYONE, NUM_BINS // 4]
    predictor.update(filled(EVERYONE, 300), filled(500, 300), filled(MAX_TOKENS, 300))
    assert alone < 0.1
    assert predictor.curves[EVERYONE, NUM_BINS // 4] == pytest.approx(0.75, abs=0.02)


def test_old_evidence_fades() -> None:
    predictor = learned(filled(100, 4000))
    for _ in range(40):
        observe(predictor, filled(900, 500))
    predictor.update(NONE, NONE, NONE)
    assert predictor.mean_and_spread(EVERYONE)[0] == pytest.approx(0.9, abs=0.02)


def test_a_group_starts_from_everyone_and_learns_its_own() -> None:
    predictor = learned(filled(100, 1000))
    group = predictor.open_group()
    predictor.update(NONE, NONE, NONE)
    assert predictor.mean_and_spread(group)[0] == pytest.approx(0.1, abs=0.01)
    observe(predictor, filled(700, 200), group)
    predictor.update(NONE, NONE, NONE)
    assert predictor.mean_and_spread(group)[0] == pytest.approx(0.7, abs=0.03)
    assert predictor.mean_and_spread(EVERYONE)[0] < 0.3
    assert guesses(predictor, group=group).mean() == pytest.approx(700, abs=30)


def test_groups_are_reused_and_bounded() -> None:
    predictor = LengthPredictor()
    groups = [predictor.open_group() for _ in range(MAX_GROUPS - 1)]
    assert len(set(groups)) == MAX_GROUPS - 1
    assert EVERYONE not in groups
    assert predictor.open_group() == EVERYONE
    observe(predictor, filled(10, 500), groups[3])
    predictor.close_group(groups[3])
    assert predictor.open_group() == groups[3]
    predictor.update(filled(EVERYONE, 10_000), filled(900, 10_000), filled(MAX_TOKENS, 10_000))
    assert predictor.mean_and_spread(groups[3])[0] > 0.9, "nothing of the group before is left"


def test_survival_is_the_share_that_computes_each_token() -> None:
    predictor = learned(np.repeat(np.asarray([250, 1000], np.int32), 2000))
    alive = predictor.predict_survival(EVERYONE, MAX_TOKENS)
    assert alive.size == MAX_TOKENS
    assert alive[200] == pytest.approx(1.0, abs=0.01)
    assert alive[300] == pytest.approx(0.5, abs=0.02)


@given(
    lengths=st.lists(st.integers(1, 60), max_size=30),
    generated=st.integers(0, 59),
    rank=st.floats(0.001, 0.999),
    max_tokens=st.sampled_from([1, 2, 7, 60, 61, 5000]),
)
def test_a_guess_lies_between_what_is_there_and_the_limit(
    lengths: list[int], generated: int, rank: float, max_tokens: int
) -> None:
    predictor = LengthPredictor()
    column = np.minimum(np.asarray(lengths, dtype=np.int32), max_tokens)
    limit = np.full_like(column, max_tokens)
    predictor.observe(filled(EVERYONE, column.size), column, limit, column == max_tokens)
    predictor.update(NONE, NONE, NONE)
    generated = min(generated, max_tokens - 1)
    guess = predictor.predict_lengths(
        filled(EVERYONE, 1), filled(generated, 1), filled(max_tokens, 1), np.asarray([rank])
    )
    assert generated < int(guess[0]) <= max_tokens
