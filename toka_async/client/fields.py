"""The fields of a request beside its prompt, named as in /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from toka_async.client.errors import RequestError

MOST_DEPTH = 128  # nested lists and maps in a field; a schema has two of them for each object within another

_ENCODER = msgspec.msgpack.Encoder()


class Fields(TypedDict, total=False):
    """server/API.md explains them. text: False leaves text out, which is much cheaper for the server."""

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float]
    stop: str | list[str]
    stop_token_ids: list[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    add_special_tokens: bool
    logprobs: int
    prompt_logprobs: int
    logprobs_mode: str
    priority: int
    allowed_token_ids: list[int]
    cache_salt: str
    structured_outputs: dict[str, Any]
    response_format: dict[str, Any]
    guided_json: dict[str, Any] | str
    guided_regex: str
    guided_choice: list[str]
    guided_grammar: str
    guided_whitespace_pattern: str
    thinking_token_budget: int
    text: bool
    model: str


def encode(fields: Mapping[str, Any]) -> bytes:
    """Encode fields for the wire. Raises RequestError that names the field at fault."""
    try:
        return _ENCODER.encode(fields)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        if len(fields) > 1:
            for name, value in fields.items():
                encode({name: value})
        name = next(iter(fields))
        raise RequestError(f"'{name}' cannot be sent: {error}", field=name) from None


def check_depth(fields: Mapping[str, Any]) -> None:
    """Raise RequestError for fields that the server could not decode: it could not tell whose request it is."""
    for name, value in fields.items():
        if is_deep(value, MOST_DEPTH):
            raise RequestError(f"'{name}' is nested too deeply", field=name)


def is_deep(value: object, most: int) -> bool:
    if not isinstance(value, list | tuple | dict):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return not most or any(is_deep(part, most - 1) for part in parts)
