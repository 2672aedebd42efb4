from __future__ import annotations

from typing import Any

import pytest

from tests.unit.openai.test_generation import DEFAULTS, LIMITS, chat, completion
from toka_async.openai.answer_size import ENTRY_BYTES, ID_BYTES, answer_bytes, check_answer_size
from toka_async.openai.errors import ApiError
from toka_async.openai.generation import GenerationParams, chat_generation
from toka_async.openai.requests import ChatBatchRequest


def size(generation: GenerationParams, num_prompt: int = 10, max_new: int = 0, num_echoed: int = 0) -> float:
    return answer_bytes(generation, num_prompt, max_new, num_echoed) / ENTRY_BYTES


def test_generated_text_counts_for_nothing() -> None:
    assert size(completion(n=8), 1000, 10**12) == 0
    assert size(chat(n=8), 1000, 10**12) == 0


def test_what_each_choice_repeats_counts_n_times() -> None:
    assert size(completion(n=8, echo=True, logprobs=4)) == 8 * 10 * 5
    assert size(completion(n=8, prompt_logprobs=4)) == 8 * 10 * 5
    assert size(completion(n=8, echo=True, logprobs=4, prompt_logprobs=2)) == 8 * 10 * (5 + 3)
    assert size(completion(n=8, logprobs=4)) == 0
    assert size(completion(n=8, echo=True), num_echoed=600) == 8 * 600 * 4 / ENTRY_BYTES
    assert size(chat(n=8, prompt_logprobs=4)) == 10 * 5


def test_the_prompts_token_ids_count_in_each_choice_that_has_them() -> None:
    many = ChatBatchRequest(messages=[], n=8, return_token_ids=True)
    for each in (
        completion(n=8, return_token_ids=True),
        completion(n=8, return_token_ids=True, stream=True),
        chat(n=8, return_token_ids=True, stream=True),
        chat_generation(many, LIMITS, DEFAULTS),
    ):
        assert size(each) == 8 * 10 * ID_BYTES / ENTRY_BYTES
    assert size(chat(n=8, return_token_ids=True)) == 10 * ID_BYTES / ENTRY_BYTES


def test_samples_count_unless_they_are_streamed() -> None:
    assert size(completion(n=8, logprobs=0), max_new=100) == 100
    assert size(completion(n=8, logprobs=3), max_new=100) == 400
    assert size(chat(n=8, logprobs=True, top_logprobs=3), max_new=100) == 400
    assert size(chat(n=8, logprobs=True, top_logprobs=3, stream=True), max_new=100) == 0
    assert size(completion(n=8, echo=True, logprobs=3, stream=True), max_new=100) == 8 * 10 * 4


@pytest.mark.parametrize(
    ("generation", "max_new", "param", "fix"),
    [
        (completion(n=8, echo=True, logprobs=4), 0, "n", "Lower n, or do not ask for the prompt's tokens"),
        (completion(prompt_logprobs=4), 0, "prompt", "log-probs"),
        (completion(n=2, logprobs=4), 10**6, "n", "max_tokens, or stream it"),
        (chat(logprobs=True), 10**6, "max_tokens", "stream it"),
        (completion(n=8, return_token_ids=True), 0, "n", "Lower n"),
        (chat(n=8, return_token_ids=True, stream=True), 0, "n", "Lower n"),
    ],
)
def test_what_could_be_too_large_is_refused(generation: Any, max_new: int, param: str, fix: str) -> None:
    check_answer_size(generation, 10, 10, 10, 1)
    with pytest.raises(ApiError, match=r"limits\.max_answer_mb is 1") as caught:
        check_answer_size(generation, 10**5, max_new, 0, 1)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, param, "answer_too_large")
    assert fix in error.message
