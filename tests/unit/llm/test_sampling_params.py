from __future__ import annotations

from typing import Any

import pytest

from toka_async.llm.sampling_params import (
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from toka_async.openai.parse import parse_fields
from toka_async.openai.requests import DirectRequest


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    assert params.stop == []
    assert params.logprobs is None
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def test_the_models_own_values_never_replace_what_was_given() -> None:
    fields = SamplingParams().make_fields()
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"} <= fields.keys()


def test_every_field_reaches_the_engine() -> None:
    given: dict[str, Any] = {
        "n": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "max_tokens": 20,
        "min_tokens": 2,
        "logprobs": 4,
        "prompt_logprobs": 0,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "allowed_token_ids": [1, 2],
        "thinking_token_budget": 9,
    }
    fields = SamplingParams(**given, logit_bias={5: -1.0}, stop="a").make_fields()
    assert given.items() <= fields.items()
    assert fields["logit_bias"] == {"5": -1.0}
    assert fields["stop"] == ["a"]
    parse_fields(fields, DirectRequest)


def test_the_engine_makes_texts_of_streams_and_where_it_finds_stop_strings() -> None:
    assert SamplingParams().make_fields()["text"] is False
    assert SamplingParams(stop="a").make_fields()["text"] is True
    assert SamplingParams().make_fields(stream=True)["text"] is True
    assert SamplingParams(detokenize=False).make_fields(stream=True)["text"] is False


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"temprature": 1.0}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"bad_words": ["x"]}, "'bad_words' is not supported"),
        ({"structured_outputs": {"jsn": {}}}, "unknown field 'structured_outputs.jsn'"),
        ({"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}}, "'guided_decoding'"),
        ({"flat_logprobs": True}, "'flat_logprobs' is not supported"),
        ({"temperature": -1.0}, "'temperature'"),
        ({"top_p": 2.0}, "'top_p'"),
        ({"logprobs": -2}, "'logprobs'"),
        ({"logprobs_mode": "raw_logits"}, "'logprobs_mode'"),
        ({"n": 0}, "'n'"),
        ({"seed": 2**63}, "'seed'"),
        ({"stop": "a", "detokenize": False}, "detokenize=True"),
        ({"stop": ["a", ""]}, "'stop' must not hold an empty string"),
        ({"min_tokens": 17}, "'min_tokens' (17) is above max_tokens (16)"),
        ({"stop": 3}, "'stop': expected a list, got int"),
        ({"stop_token_ids": 3}, "'stop_token_ids': expected a list, got int"),
        ({"allowed_token_ids": 2.5}, "'allowed_token_ids': expected a list, got float"),
        ({"logit_bias": [3]}, "'logit_bias': expected a dict, got list"),
        ({"structured_outputs": 3}, "'structured_outputs': expected a dict, got int"),
        ({"watermarking": True}, "'watermarking' is not supported"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match="SamplingParams") as caught:
        SamplingParams(**fields)
    assert part in str(caught.value)


def test_structured_outputs_have_vllms_forms() -> None:
    wish = {"choice": ["a", "b"]}
    for params in (
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"])),
        SamplingParams(structured_outputs=wish),
        SamplingParams(guided_decoding=GuidedDecodingParams(choice=["a", "b"])),
    ):
        assert params.make_fields()["structured_outputs"] == wish
    assert SamplingParams(structured_outputs=StructuredOutputsParams(json={})).make_fields()["structured_outputs"] == {
        "json": {}
    }


def test_what_asks_for_nothing_is_taken() -> None:
    others: dict[str, Any] = {
        "bad_words": [],
        "structured_outputs": None,
        "flat_logprobs": False,
        "guided_decoding": None,
        "guided_decoding_backend": "auto",
    }
    assert SamplingParams(**others) == SamplingParams()


def test_fields_can_be_set_later_and_are_checked_then() -> None:
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(ValueError, match="top_p"):
        params.make_fields()


def test_a_name_that_is_no_field_cannot_be_set() -> None:
    with pytest.raises(AttributeError, match="'max_token'; did you mean 'max_tokens'"):
        SamplingParams().max_token = 5


def test_the_context_may_be_the_limit_of_tokens() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=500).make_fields()["min_tokens"] == 500


def test_a_seed_of_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()


def test_copies_are_equal_and_apart() -> None:
    params = SamplingParams(stop=["a"], n=2)
    copied = params.clone()
    assert copied == params
    copied.stop.append("b")
    assert copied != params


def test_none_is_a_default_but_for_max_tokens() -> None:
    assert SamplingParams.from_optional(temperature=None, top_p=0.5) == SamplingParams(top_p=0.5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
