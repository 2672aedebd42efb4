from __future__ import annotations

import pytest

from toka_async.evaluation.scores import cut_context, make_sampling, sum_logprobs
from toka_async.llm.outputs import Logprob


@pytest.mark.parametrize(
    ("num_context", "num_continuation", "max_tokens", "tokens", "context"),
    [
        (3, 2, 9, [0, 1, 2, 3, 4], 3),
        (3, 2, 4, [1, 2, 3, 4], 2),
        (3, 2, 2, [3, 4], 1),  # the first token is scored by nothing
        (0, 3, 9, [0, 1, 2], 1),
    ],
)
def test_the_end_of_a_context_is_kept(
    num_context: int, num_continuation: int, max_tokens: int, tokens: list[int], context: int
) -> None:
    every = list(range(num_context + num_continuation))
    assert cut_context(every[:num_context], every[num_context:], max_tokens) == (tokens, context)


def test_only_the_continuation_is_summed() -> None:
    best = {7: Logprob(-0.5), 9: Logprob(-1.0)}
    other = {8: Logprob(-2.0), 9: Logprob(-0.25)}
    assert sum_logprobs([5, 8, 7], [None, other, best], 2) == (-0.5, True)
    assert sum_logprobs([5, 8, 7], [None, other, best], 1) == (-2.5, False)
    assert sum_logprobs([5, 8, 7], [None, other, best], 3) == (0.0, True)


def test_what_is_as_likely_as_the_likeliest_counts_as_greedy() -> None:
    assert sum_logprobs([5, 8], [None, {8: Logprob(-0.5), 9: Logprob(-0.5)}], 1) == (-0.5, True)


def test_sampling() -> None:
    generation = {"do_sample": False, "until": ["x"], "max_gen_toks": 300, "temperature": 0.0, "unknown": 1}
    assert make_sampling(generation, 7, ["x", ""]) == {
        "temperature": 0.0,
        "unknown": 1,
        "max_tokens": 7,
        "stop": ["x"],
    }
    assert make_sampling({"until": []}, 7, [])["temperature"] == 0.0
    assert make_sampling({"temperature": 0.5}, 7, [])["temperature"] == 0.5
