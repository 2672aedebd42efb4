from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from toka_async.llm.prompts import PlainPrompt, TextPrompt, TokensPrompt, list_prompts


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("a", [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2], [(None, [1, 2])]),
        (np.array([1, 2]), [(None, [1, 2])]),
        (np.array([[1, 2], [3, 4]]), [(None, [1, 2]), (None, [3, 4])]),
        ([[1, 2], [3]], [(None, [1, 2]), (None, [3])]),
        (torch.tensor([[1, 2]]), [(None, [1, 2])]),
        (np.array(["a", "b"]), [("a", None), ("b", None)]),
        ([np.int64(1), 2], [(None, [1, 2])]),
        (TextPrompt(prompt="a"), [("a", None)]),
        ([TokensPrompt(prompt_token_ids=(1, 2))], [(None, [1, 2])]),
        ([{"prompt": "a", "prompt_token_ids": [1]}, "b"], [("a", [1]), ("b", None)]),
        ([{"prompt": "a", "multi_modal_data": None}], [("a", None)]),
        ([], []),
    ],
)
def test_every_form_of_a_prompt(given: Any, listed: list[tuple[str | None, list[int] | None]]) -> None:
    assert [(prompt.text, prompt.token_ids) for prompt in list_prompts(given)] == listed


def test_ids_of_other_libraries_become_integers_of_python() -> None:
    (prompt,) = list_prompts(np.array([1, 2]))
    assert prompt.token_ids is not None
    assert {type(token) for token in prompt.token_ids} == {int}


def test_a_salt_goes_along() -> None:
    assert list_prompts({"prompt": "a", "cache_salt": "s"}) == [PlainPrompt("a", None, "s")]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (5, "expected text, token ids"),
        (["a", []], "prompt 1 has no tokens"),
        (["a", 5.0], "prompt 1 is not text"),
        ([5, "a"], "token ids must be integers, not str"),
        ([[1], [5, 2.0]], "prompt 1: token ids must be integers, not float"),
        ([{}], "needs 'prompt'"),
        ([{"prompt": 5}], "'prompt' must be text"),
        ([{"prompt": "a", "cache_salt": 5}], "'cache_salt' must be text"),
        ([True, False], "must be integers, not bool"),
        ((prompt for prompt in ["a"]), "got generator"),
        (b"a", "got bytes"),
        ([{"prompt": "a", "multi_modal_data": {"image": 1}}], "only text and token ids"),
        ([{"prompt": "a", "promt": "b"}], "'promt'"),
    ],
)
def test_anything_else_is_refused(given: Any, part: str) -> None:
    with pytest.raises(ValueError, match="prompt") as caught:
        list_prompts(given)
    assert part in str(caught.value)
