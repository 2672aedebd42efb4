from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from toka_async.openai.errors import ApiError
from toka_async.openai.prompts import check_vocabulary, count_work, parse_prompts, parse_token_ids


def test_the_four_forms() -> None:
    assert parse_prompts("a") == ["a"]
    assert parse_prompts(["a", "b"]) == ["a", "b"]
    (ids,) = parse_prompts([1, 2])
    assert isinstance(ids, np.ndarray)
    assert ids.dtype == np.int32
    assert ids.tolist() == [1, 2]
    assert [np.asarray(each).tolist() for each in parse_prompts([[1], [2, 3]])] == [[1], [2, 3]]


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        [1, "a"],
        ["a", [1]],
        [1, True],
        [1.5],
        [[1, "a"]],
        [-1],
        [2**31],
        [2**70],
        [-(2**31) - 1],
        [[0, -1]],
        [None],
    ],
)
def test_what_is_no_prompt(prompt: list[Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse_prompts(prompt)
    assert caught.value.status == 400
    assert caught.value.param == "prompt"


def test_the_vocabulary_is_stated() -> None:
    check_vocabulary(parse_token_ids([0, 9]), 10)
    with pytest.raises(ApiError, match="token id 10, out of range: the model's vocabulary has 10 tokens"):
        check_vocabulary(parse_token_ids([0, 10]), 10)


@pytest.mark.parametrize(
    ("prompt", "count"), [("abc", 1), (["a", "b"], 2), ([1, 2, 3], 3), ([[1, 2, 3], [4]], 68), ([[], {}], 33)]
)
def test_work_is_counted_of_any_prompt(prompt: str | list[object], count: int) -> None:
    assert count_work(prompt) == count
