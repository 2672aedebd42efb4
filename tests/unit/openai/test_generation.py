from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from toka_async.arrays import as_f32, as_i32
from toka_async.openai.errors import ApiError
from toka_async.openai.generation import (
    Defaults,
    GenerationParams,
    RequestLimits,
    chat_generation,
    completion_generation,
    token_budget,
    truncate_prompt,
)
from toka_async.openai.requests import ChatRequest, CompletionRequest, StreamOptions

LIMITS = RequestLimits(max_context=100, cache_tokens=1000, vocab_size=50, max_n=8)
DEFAULTS = Defaults(temperature=0.7, top_p=0.9, top_k=20, end_ids=(3, 2))


def completion(**fields: Any) -> GenerationParams:
    return completion_generation(CompletionRequest(prompt="x", **fields), LIMITS, DEFAULTS)


def chat(**fields: Any) -> GenerationParams:
    return chat_generation(ChatRequest(messages=[], **fields), LIMITS, DEFAULTS)


def param(call: Any, **fields: Any) -> str | None:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    assert caught.value.status == 400
    return caught.value.param


def test_defaults_of_the_model() -> None:
    sampling = completion().sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 20, 0.0)
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (-1, -1)
    assert as_i32(sampling.end_ids).tolist() == [2, 3]


def test_the_request_comes_first() -> None:
    sampling = completion(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.1, repetition_penalty=1.1).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 0, 0.1)
    assert sampling.repetition_penalty == 1.1


def test_max_tokens() -> None:
    assert completion().max_tokens == 16
    assert completion(max_tokens=0).max_tokens == 0
    assert chat().max_tokens is None
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=6).max_tokens == 6
    assert chat(max_completion_tokens=6, max_tokens=6).max_tokens == 6
    assert param(chat, max_completion_tokens=6, max_tokens=5) == "max_completion_tokens"


def test_end_tokens() -> None:
    assert as_i32(completion(stop_token_ids=[7]).sampling.end_ids).tolist() == [2, 3, 7]
    assert as_i32(completion(stop_token_ids=[7], ignore_eos=True).sampling.end_ids).tolist() == [7]
    assert len(completion(ignore_eos=True).sampling.end_ids) == 0
    assert param(completion, stop_token_ids=[50]) == "stop_token_ids"


def test_bias() -> None:
    sampling = completion(logit_bias={"4": -100.0, "49": 1.5}).sampling
    assert as_i32(sampling.bias_ids).tolist() == [4, 49]
    assert as_f32(sampling.bias_values).tolist() == [-100.0, 1.5]


@pytest.mark.parametrize("key", ["50", "-1", "x", "", "1.0", "٣", "9" * 30])
def test_bias_of_no_token(key: str) -> None:
    assert param(completion, logit_bias={key: 1.0}) == "logit_bias"


def test_logprobs_and_echo() -> None:
    assert completion(logprobs=0).sampling.num_logprobs == 0
    echoed = completion(logprobs=2, echo=True).sampling
    assert (echoed.num_logprobs, echoed.num_prompt_logprobs) == (2, 2)
    assert completion(echo=True, max_tokens=0).sampling.num_prompt_logprobs == -1
    both = completion(logprobs=2, echo=True, prompt_logprobs=5)
    assert (both.num_prompt_logprobs, both.sampling.num_prompt_logprobs) == (5, 5)
    less = completion(logprobs=2, echo=True, prompt_logprobs=1)
    assert (less.num_prompt_logprobs, less.sampling.num_prompt_logprobs) == (1, 2)
    assert chat(logprobs=True).sampling.num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).sampling.num_logprobs == 4
    assert chat(logprobs=False).sampling.num_logprobs == -1


def test_stops() -> None:
    assert completion(stop="a").stops == ("a",)
    assert completion(stop=["b", "a", "b"]).stops == ("b", "a")
    assert completion().stops == ()
    for stop in ("", ["a", ""], [str(i) for i in range(10_000)], "x" * 2000):
        assert param(completion, stop=stop) == "stop"


def test_fields_that_hang_together() -> None:
    assert completion(n=2, best_of=2).n == 2
    assert param(completion, n=2, best_of=3) == "best_of"
    assert param(completion, best_of=2) == "best_of"
    assert param(completion, n=9) == "n"
    assert param(completion, min_tokens=17) == "min_tokens"
    assert param(completion, stream_options=StreamOptions()) == "stream_options"
    assert param(completion, stream=True, prompt_logprobs=1) == "prompt_logprobs"
    assert param(chat, top_logprobs=1) == "top_logprobs"
    assert completion(stream=True, stream_options=StreamOptions(include_usage=True)).include_usage


def test_seeds() -> None:
    assert completion(seed=-(2**63)).seed == -(2**63)
    assert completion().seed != completion().seed


def test_the_budget() -> None:
    assert token_budget(LIMITS, 90, 10, "prompt") == 10
    assert token_budget(LIMITS, 90, None, "prompt") == 10
    assert token_budget(LIMITS, 100, 0, "prompt") == 0
    small = RequestLimits(max_context=100, cache_tokens=40, vocab_size=50, max_n=8)
    assert token_budget(small, 30, None, "prompt") == 10


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param", "numbers"),
    [(100, None, "messages", "100"), (101, 0, "messages", "101"), (90, 11, "max_tokens", "90 of the prompt and 11 of")],
)
def test_beyond_the_context(num_prompt: int, max_tokens: int | None, param: str, numbers: str) -> None:
    with pytest.raises(ApiError, match=numbers) as caught:
        token_budget(LIMITS, num_prompt, max_tokens, "messages")
    assert caught.value.param == param
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 100 tokens" in caught.value.message


def test_beyond_the_cache() -> None:
    small = RequestLimits(max_context=100, cache_tokens=40, vocab_size=50, max_n=8)
    with pytest.raises(ApiError, match="the KV cache's size is 40 tokens, but the prompt has 41"):
        token_budget(small, 41, 1, "prompt")


def test_stop_strings_have_a_bound_together() -> None:
    assert len(completion(stop=["a" * 1000 + str(i) for i in range(8)]).stops) == 8
    assert param(completion, stop=["a" * 1000 + str(i) for i in range(9)]) == "stop"


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-46, 7e-46, 9.9e-6])
def test_a_temperature_that_nothing_can_be_divided_by_is_greedy(temperature: float) -> None:
    assert completion(temperature=temperature).sampling.temperature == 0.0
    assert completion(temperature=1e-5).sampling.temperature == 1e-5


def test_allowed_token_ids() -> None:
    assert as_i32(completion(allowed_token_ids=[7, 3, 7]).sampling.allowed_ids).tolist() == [3, 7]
    assert not completion().sampling.allowed_ids
    assert param(completion, allowed_token_ids=[1, 50]) == "allowed_token_ids"
    assert param(completion, allowed_token_ids=[2, 3], min_tokens=1) == "allowed_token_ids"
    assert completion(allowed_token_ids=[2, 3, 4], min_tokens=1)
    assert completion(allowed_token_ids=[2, 3], min_tokens=1, ignore_eos=True)


@pytest.mark.parametrize(
    ("num", "side", "max_tokens", "kept"),
    [
        (3, "left", 1, [7, 8, 9]),
        (3, "right", 1, [0, 1, 2]),
        (20, "left", 1, list(range(10))),
        (-1, "left", 92, [2, 3, 4, 5, 6, 7, 8, 9]),
        (-1, "right", None, list(range(10))),
        (-1, "left", 100, [9]),
    ],
)
def test_truncation(num: int, side: Any, max_tokens: int | None, kept: list[int]) -> None:
    how = chat(truncate_prompt_tokens=num, truncation_side=side).truncation
    assert how is not None
    assert truncate_prompt(np.arange(10, dtype=np.int32), how, LIMITS, max_tokens).tolist() == kept


def test_no_truncation_and_none_to_nothing() -> None:
    assert completion().truncation is None
    assert param(completion, truncate_prompt_tokens=0) == "truncate_prompt_tokens"


def test_no_likeliest_tokens_need_no_log_probs() -> None:
    assert chat(top_logprobs=0).sampling.num_logprobs == -1
    assert param(chat, top_logprobs=1) == "top_logprobs"
