"""The prompts of a request to /generate, and what each of them asks for. Knows no engine."""

from __future__ import annotations

import secrets
from typing import Any, TypeVar

import msgspec

from toka_async.openai.errors import bad_request
from toka_async.openai.prompts import Prompt, parse_token_ids
from toka_async.server.sglang.requests import SglangRequest, SglangSampling

T = TypeVar("T")


class Wish(msgspec.Struct, frozen=True):
    """What a request wants of a prompt. num_top: of the likeliest tokens. start: the prompt's log-probs begin there."""

    sampling: SglangSampling
    logprobs: bool
    num_top: int
    start: int


class Part(msgspec.Struct, frozen=True):
    """Prompts that want the same, by their places in the request."""

    wish: Wish
    places: list[int]


def parse_inputs(wire: SglangRequest) -> list[Prompt]:
    """Returns the prompts. Raises ApiError (400) for none, for both kinds, and for what is no token id."""
    if (wire.text is None) == (wire.input_ids is None):
        raise bad_request("give either 'text' or 'input_ids'", param="input_ids")
    if wire.text is not None:
        return [wire.text] if isinstance(wire.text, str) else list(wire.text)
    if is_single(wire):
        return [parse_token_ids(wire.input_ids or [], "input_ids")]
    if not all(isinstance(each, list) for each in wire.input_ids or ()):
        raise bad_request("'input_ids' must not mix token ids and lists", param="input_ids")
    return [parse_token_ids(each, "input_ids") for each in wire.input_ids or ()]


def is_single(wire: SglangRequest) -> bool:
    """Tells whether the request is one prompt, not a list of them."""
    if wire.text is not None:
        return isinstance(wire.text, str)
    return not (wire.input_ids and isinstance(wire.input_ids[0], list))


def divide(wire: SglangRequest, num_prompts: int) -> list[Part]:
    """Returns the prompts in parts that want the same.

    Raises ApiError (400) when a list has not an item for each prompt, or `n` differs.
    """
    samplings = spread(wire.sampling_params, num_prompts, "sampling_params")
    if len({each.n for each in samplings}) > 1:
        raise bad_request("'sampling_params' must have the same n for all prompts", param="sampling_params")
    columns = (
        samplings,
        spread(wire.return_logprob, num_prompts, "return_logprob"),
        spread(wire.top_logprobs_num, num_prompts, "top_logprobs_num"),
        spread(wire.logprob_start_len, num_prompts, "logprob_start_len"),
    )
    parts: dict[bytes, Part] = {}
    for place, (sampling, logprobs, num_top, start) in enumerate(zip(*columns, strict=True)):
        wish = Wish(sampling, logprobs, num_top if logprobs else 0, start if logprobs else -1)
        parts.setdefault(msgspec.json.encode(wish), Part(wish, [])).places.append(place)
    return list(parts.values())


def spread(value: T | list[T], num_prompts: int, param: str) -> list[T]:
    """Returns an item for each prompt."""
    if not isinstance(value, list):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise bad_request(f"'{param}' has {len(value)} items for {num_prompts} prompts", param=param)
    return value


def name_prompts(rid: str | list[str] | None, num_prompts: int, *, is_one: bool) -> list[str]:
    """Returns the ids of the prompts: given, made of a given one, or new."""
    given: Any = secrets.token_hex(16) if rid is None else rid
    if isinstance(given, str):
        return [given] if is_one else [f"{given}_{place}" for place in range(num_prompts)]
    names = spread(given, num_prompts, "rid")
    if len(set(names)) < len(names):
        raise bad_request("'rid' has the same id twice", param="rid")
    return names
