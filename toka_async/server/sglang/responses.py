"""The answers of SGLang's POST /generate as Structs. UNSET fields are left out. Knows shapes only."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from toka_async.openai.responses import WeightSpan

LoggedToken = tuple[float | None, int, str | None]  # log-prob, token id, and the token's text where it is wanted
LoggedTokens = list[LoggedToken]


class SglangFinish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a sample has ended. matched: the end token or the stop string. length: of the sample, in tokens. message:
    of an abort.
    """

    type: str
    matched: int | str | UnsetType = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


class SglangMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a sample. finish_reason: null while it streams.

    input_token_logprobs: of the prompt from `logprob_start_len` on; the first token has no log-prob. top log-probs: of
    each token the likeliest ones. weight_version: of the newest token.
    """

    id: str
    finish_reason: SglangFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[WeightSpan]
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: LoggedTokens | msgspec.Raw | UnsetType = UNSET
    output_token_logprobs: LoggedTokens | msgspec.Raw | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    input_top_logprobs: list[LoggedTokens | None] | msgspec.Raw | UnsetType = UNSET
    output_top_logprobs: list[LoggedTokens | None] | msgspec.Raw | UnsetType = UNSET


class SglangSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample, or as much as there is of one that streams: text and ids from its beginning. index: in a stream of
    several samples.
    """

    text: str
    output_ids: list[int]
    meta_info: SglangMeta
    prompt_token_ids: list[int] | UnsetType = UNSET
    index: int | UnsetType = UNSET
