"""The fields of a request beside its prompt, named as in /v1/completions."""

from __future__ import annotations

from typing import TypedDict


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
    priority: int
    allowed_token_ids: list[int]
    cache_salt: str
    text: bool
    model: str
