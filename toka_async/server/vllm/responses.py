"""The answers of vLLM's POST /inference/v1/generate as Structs, chunks included.

UNSET fields are left out; None is written as null. Knows shapes only.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from toka_async.openai.responses import FinishReason, PromptLogprobs, StopReason, Usage, WeightSpan

OutputMode = Literal["tokens", "text"]


class LikelyToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token at one place, with its log-prob.

    token: `token_id:5`, or the token's text in the mode `text`, where `bytes` are the text's. rank: among all tokens,
    from 1; None where it is not known, because the token is none of the likeliest that were asked for.
    """

    token: str
    token_id: int
    logprob: float
    rank: int | None
    bytes: tuple[int, ...] | None = None


class SampledToken(LikelyToken, frozen=True, kw_only=True):
    """The sampled token at one place. top_logprobs: it again, and then the others of the likeliest tokens."""

    top_logprobs: list[LikelyToken]


class TokensLogprobs(msgspec.Struct, frozen=True):
    """content: one entry for each token."""

    content: list[SampledToken]


class TokensChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A sample, or what is new of a streamed one."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: StopReason
    token_ids: list[int]
    logprobs: TokensLogprobs | msgspec.Raw | None  # Raw: the same, as JSON already
    text: str | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET


class GeneratedTokens(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    model: str
    created: int
    output_mode: OutputMode
    choices: list[TokensChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.Raw | None  # Raw: likewise
    prompt_token_ids: list[int] | None


class GeneratedTokensChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a streamed answer. The last one has the usage and no choices, where it is wanted."""

    request_id: str
    output_mode: OutputMode
    choices: list[TokensChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET
