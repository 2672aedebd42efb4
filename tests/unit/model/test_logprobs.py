import numpy as np
import pytest
import torch

from toka_async.arrays import Int32
from toka_async.model.logprobs import add_ranks, concatenate, distribution, select_logprobs


def each(num_top: int, num_rows: int) -> Int32:
    return np.full(num_rows, num_top, np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_and_likeliest_of_the_raw_distribution(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 90, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = logits.double().log_softmax(-1)
    ids = torch.tensor([0, 89, 3, 3, 7])
    values = select_logprobs(distribution(logits), ids, each(4, len(logits)))
    torch.testing.assert_close(values.chosen.double(), expected[torch.arange(5), ids], atol=1e-5, rtol=0)
    torch.testing.assert_close(values.top.double(), expected.topk(4).values, atol=1e-5, rtol=0)
    torch.testing.assert_close(expected.gather(1, values.top_ids).float(), values.top, atol=1e-5, rtol=0)


def test_likeliest_first_and_ties_by_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0]])
    assert select_logprobs(distribution(logits), torch.tensor([0]), each(5, len(logits))).top_ids.tolist() == [
        [1, 2, 4, 0, 5]
    ]


def test_values_are_finite_whatever_the_logits() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf], [-torch.inf] * 3, [torch.nan, 0.0, 1.0]])
    values = select_logprobs(distribution(logits), torch.tensor([0, 1, 2]), each(3, len(logits)))
    assert values.chosen.isfinite().all()
    assert values.top.isfinite().all()
    assert values.top[0, 0] == 0


def test_no_more_than_the_vocabulary_and_none() -> None:
    values = distribution(torch.zeros(2, 3))
    assert (
        select_logprobs(values, torch.zeros(2, dtype=torch.int64), each(20, len(values))).top_ids.tolist()
        == [[0, 1, 2]] * 2
    )
    assert select_logprobs(values, torch.zeros(2, dtype=torch.int64), each(0, len(values))).top.shape == (2, 0)


def test_concatenate_keeps_the_order() -> None:
    values = distribution(torch.randn(4, 9, generator=torch.Generator().manual_seed(2)))
    ids = torch.tensor([1, 2, 3, 4])
    whole = select_logprobs(values, ids, each(2, len(values)))
    parts = concatenate(
        [select_logprobs(values[i : i + 2], ids[i : i + 2], each(2, len(values[i : i + 2]))) for i in (0, 2)]
    )
    assert torch.equal(parts.chosen, whole.chosen)
    assert torch.equal(parts.top_ids, whole.top_ids)
    assert torch.equal(parts.top, whole.top)


def test_ranks_are_places_in_the_order_of_likeliest_ids() -> None:
    """Ties, which are common in 16 bits, by lowest id: so the two agree."""
    logits = torch.randint(-3, 3, (6, 30), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    values = distribution(logits)
    ids = torch.randint(0, 30, (6,), generator=torch.Generator().manual_seed(4))
    ranked = add_ranks(values, ids, select_logprobs(values, ids, each(30, len(values))))
    assert ranked.ranks is not None
    assert torch.equal(ranked.top_ids.gather(1, ranked.ranks[:, None].long() - 1)[:, 0], ids)
    halves = [(values[i : i + 3], ids[i : i + 3]) for i in (0, 3)]
    parts = concatenate([add_ranks(part, of, select_logprobs(part, of, each(2, len(part)))) for part, of in halves])
    assert parts.ranks is not None
    assert torch.equal(parts.ranks, ranked.ranks)


def test_which_ids_tie_for_the_last_place_does_not_depend_on_how_many_others_want() -> None:
    logits = torch.randint(-2, 2, (20, 400), generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    values = distribution(logits)
    ids = torch.zeros(20, dtype=torch.int64)
    most = select_logprobs(values, ids, each(20, len(values))).top_ids
    for num_top in (1, 3, 7, 19):
        assert torch.equal(select_logprobs(values, ids, each(num_top, len(values))).top_ids, most[:, :num_top])
