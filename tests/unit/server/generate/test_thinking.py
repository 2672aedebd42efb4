from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cases.grammars import END_IDS, load_marked
from toka_async.arrays import Int32
from toka_async.openai.errors import ApiError
from toka_async.openai.generation import Defaults, GenerationParams, RequestLimits, completion_generation
from toka_async.openai.requests import CompletionRequest
from toka_async.server.generate.thinking import bound_thoughts, count_written, find_last
from toka_async.text.formats.choice import choose_format

TOKENIZER, VOCABULARY = load_marked()
THINKS = choose_format("", "none", "think")
HARMONY = choose_format("", "harmony", "harmony")


def encode(text: str) -> Int32:
    return np.asarray(TOKENIZER.encode(text, False), np.int32)


def bound(budget: int, *prompts: str, known: Any = THINKS, **fields: Any) -> GenerationParams:
    wire = CompletionRequest(prompt="x", thinking_token_budget=budget, **fields)
    limits = RequestLimits(2000, 2000, TOKENIZER.vocab_size, 8)
    generation = completion_generation(wire, limits, Defaults(end_ids=END_IDS))
    return bound_thoughts(generation, [encode(each) for each in prompts], known, TOKENIZER, END_IDS)


def accepts(generation: GenerationParams, text: str) -> bool:
    matcher, ids = VOCABULARY.compile(generation.sampling.grammar), encode(text).tolist()
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("prompt", "text", "is_allowed"),
    [
        ("Q", "<think>12345</think>so", True),
        ("Q", "<think>123456</think>so", False),
        ("Q", "no thought, of more than five tokens", True),
        ("Q<think>", "12345</think>so", True),
        ("Q<think>", "123456</think>so", False),
        ("Q<think>abc", "12</think>so", True),  # what the prompt has of the thought counts
        ("Q<think>abc", "123</think>so", False),
        ("Q<think>abcdefgh", "</think>so", True),
        ("Q<think>abcdefgh", "1</think>so", False),
        ("Q<think>abc</think>A\nQ", "<think>12345</think>so", True),  # an earlier thought is over
        ("Q<think>abc</think>A\nQ", "<think>123456</think>so", False),
        ("Q", "<think>1</think>and <think>1</think>", False),
    ],
)
def test_a_thought_has_as_many_tokens_as_the_budget_leaves(prompt: str, text: str, is_allowed: bool) -> None:
    assert accepts(bound(5, prompt), text) == is_allowed


def test_other_fields_say_what_follows_the_thought() -> None:
    generation = bound(3, "Q", guided_regex="[0-9]")
    assert accepts(generation, "<think>abc</think>7")
    assert accepts(generation, "7")
    assert not accepts(generation, "<think>abc</think>x")
    assert generation.grammar_param == "guided_regex"


def test_prompts_that_have_begun_as_much_share_a_grammar_and_others_are_refused() -> None:
    assert bound(3, "Q<think>a", "other<think>b").sampling.grammar
    with pytest.raises(ApiError, match="differ") as raised:
        bound(3, "Q<think>a", "Q")
    assert raised.value.param == "thinking_token_budget"


def test_any_number_is_no_grammar() -> None:
    assert bound(-1, "Q<think>").sampling.grammar == ""


def test_models_that_do_not_think_have_no_budget() -> None:
    with pytest.raises(ApiError, match="not known to think"):
        bound(3, "Q", known=None)


def test_allowed_tokens_might_not_end_a_thought() -> None:
    with pytest.raises(ApiError, match="allowed_token_ids"):
        bound(3, "Q", allowed_token_ids=[5])


def test_marks_of_several_tokens_are_found() -> None:
    generation = bound(3, "<|start|>assistant<|channel|>analysis<|message|>a", known=HARMONY)
    answer = "<|end|><|start|>assistant<|channel|>final<|message|>so"
    assert accepts(generation, f"12{answer}")
    assert not accepts(generation, f"123{answer}")


@pytest.mark.parametrize(("ids", "place"), [([1, 2, 1, 2], 2), ([1, 2, 3], 0), ([2, 1], -1), ([1], -1), ([], -1)])
def test_the_last_place_of_ids(ids: list[int], place: int) -> None:
    assert find_last(np.asarray(ids, np.int32), [1, 2]) == place


CHANNEL, END = "<|channel|>analysis<|message|>", "<|end|>"


@pytest.mark.parametrize(
    ("known", "pieces", "is_open", "count"),
    [
        (THINKS, ["<think>", "a", "b", "</think>", "so"], False, 2),
        (THINKS, ["a", "b", "</think>", "so"], True, 2),
        (THINKS, ["<think>", "a"], False, 1),
        (THINKS, ["<think>", "a", "</think>", "<think>", "b", "</think>"], False, 1),  # the second is content
        (THINKS, ["a", "b"], False, None),
        (HARMONY, [CHANNEL, "a", "b", END, "<|start|>assistant<|channel|>final<|message|>c"], False, 2),
        (HARMONY, ["<|channel|>", *"analysis", "<|message|>", "a", "b"], False, 2),
        (HARMONY, ["<|channel|>commentary<|message|>c", END, "<|start|>assistant", CHANNEL, "a", END], False, 1),
        (HARMONY, [CHANNEL, "a", END, "<|start|>assistant", CHANNEL, "b", "c", END], False, 3),
        (HARMONY, ["a", END], True, 1),
    ],
)
def test_tokens_of_a_thought_are_counted_as_they_were_written(
    known: Any, pieces: list[str], is_open: bool, count: int | None
) -> None:
    """Whatever tokens the tokenizer would make of the same text."""
    ids = [each for piece in pieces for each in encode(piece).tolist()]
    assert count_written(ids, known.thought, TOKENIZER, is_open=is_open) == count
