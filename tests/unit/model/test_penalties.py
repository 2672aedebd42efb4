from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from toka_async.model.penalties import Penalties, add_bias, apply_repetition, keep_only, subtract_counts

VOCAB = 40
ROWS = [[3, 3, 9, 3, 39], [0, 1, 2, 3, 4, 5, 5, 5, 0], [7]]
NUM_PROMPT = [2, 4, 1]


def _penalties(presence: float = 0.0, frequency: float = 0.0, repetition: float = 1.0) -> Penalties:
    """The rows, padded with ids that are penalised if the padding counts."""
    width = max(len(row) for row in ROWS) + 2
    padded = [row + [11] * (width - len(row)) for row in ROWS]
    return Penalties(
        tokens=torch.tensor(padded),
        lengths=torch.tensor([len(row) for row in ROWS]),
        num_prompt=torch.tensor(NUM_PROMPT),
        presence=torch.full((3,), presence),
        frequency=torch.full((3,), frequency),
        repetition=torch.full((3,), repetition),
    )


def _logits() -> Tensor:
    return torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("repetition", [0.7, 1.3, 2.0])
def test_repetition_equals_transformers(repetition: float) -> None:
    logits = _logits()
    expected = [
        RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([row]), logits[i : i + 1].clone())
        for i, row in enumerate(ROWS)
    ]
    apply_repetition(logits, _penalties(repetition=repetition))
    assert torch.equal(logits, torch.cat(expected))


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 0.7), (-1.0, 0.3)])
def test_counts_are_of_generated_tokens_only(presence: float, frequency: float) -> None:
    logits = _logits()
    expected = logits.clone()
    for row, (tokens, num_prompt) in enumerate(zip(ROWS, NUM_PROMPT, strict=True)):
        for token, count in Counter(tokens[num_prompt:]).items():
            expected[row, token] -= presence + frequency * count
    subtract_counts(logits, _penalties(presence, frequency))
    torch.testing.assert_close(logits, expected)
    assert torch.equal(logits[2], _logits()[2])


def test_masked_logits_stay_masked() -> None:
    logits = torch.full((3, VOCAB), -torch.inf)
    apply_repetition(logits, _penalties(repetition=1.5))
    subtract_counts(logits, _penalties(1.0, 1.0))
    assert torch.equal(logits, torch.full((3, VOCAB), -torch.inf))


def test_bias_adds_and_masks() -> None:
    logits = _logits()
    add_bias(logits, torch.tensor([0, 2]), torch.tensor([5, 6]), torch.tensor([1.5, -torch.inf]))
    assert logits[0, 5] == _logits()[0, 5] + 1.5
    assert logits[2, 6] == -torch.inf
    assert (logits != _logits()).sum() == 2


def test_only_allowed_tokens_are_left() -> None:
    logits, expected = _logits(), _logits()
    keep_only(logits, torch.tensor([0, 2]), torch.tensor([0, 0, 2]), torch.tensor([3, 39, 7]))
    assert torch.equal(logits[1], expected[1])
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == [3, 39]
    assert logits[2].isfinite().nonzero()[:, 0].tolist() == [7]
    assert torch.equal(logits[0, [3, 39]], expected[0, [3, 39]])
