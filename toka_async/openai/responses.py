"""The responses of the API as Structs, streamed chunks included.

UNSET fields are left out; None is written as null. Knows shapes only.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]
StopReason = int | str | None


class WeightSpan(msgspec.Struct, frozen=True):
    """Tokens of a sample, from `start` up to `end`, that one version of the weights generated."""

    version: str
    start: int
    end: int


class PackedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a sample with their log-probs, as arrays of little-endian numbers in base64.

    token_ids: int32 [t]. logprobs: float32 [t]. top_ids, top_logprobs: int32 and float32 [t, num_top], likeliest first.
    kept, masses: int32 and float32 [t], how many tokens the filters kept and their share of the distribution, with
    `logprobs_mode` "processed".
    """

    token_ids: str
    logprobs: str
    num_top: int
    top_ids: str | UnsetType = UNSET
    top_logprobs: str | UnsetType = UNSET
    kept: str | UnsetType = UNSET
    masses: str | UnsetType = UNSET


class PackedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probs of a prompt in the same form: entry i belongs to token i + 1. ranks: int32 [p - 1], from 1."""

    logprobs: str
    ranks: str
    num_top: int
    top_ids: str | UnsetType = UNSET
    top_logprobs: str | UnsetType = UNSET


class PackedLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Tokasaurus' compact log-probs, JSON within `system_fingerprint`; one entry for each choice.

    completion_ids: the choice's tokens [t]. The others are arrays in base64: float32 [t]; int32 and float32 [t, k],
    null without likeliest tokens.
    """

    completion_ids: list[list[int]]
    packed_chosen_logprobs: list[str]
    packed_topk_indices: list[str] | None
    packed_topk_logprobs: list[str] | None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token at a position of the prompt. rank: the token's rank among all tokens, from 1."""

    logprob: float
    rank: int
    decoded_token: str


# One entry for each prompt token; the first is None. Keys are token ids.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists, one entry for each token; an echoed prompt's first token has no log-prob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | msgspec.Raw | None = None  # Raw: the same, as JSON already
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | msgspec.Raw | UnsetType | None = UNSET  # Raw: likewise
    prompt_token_ids: list[int] | UnsetType = UNSET
    packed_logprobs: PackedTokens | UnsetType = UNSET
    packed_prompt_logprobs: PackedPrompt | UnsetType | None = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or a chunk of a streamed one. `usage` is UNSET, null, or the numbers in the last chunk."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob] | None
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """content: null where there are only calls. reasoning: the same under the name that vLLM uses now."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """prompt_token_ids: set here when the answer is to many conversations."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | msgspec.Raw | None = None  # Raw: the same, as JSON already
    finish_reason: FinishReason
    stop_reason: StopReason = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    packed_logprobs: PackedTokens | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    packed_prompt_logprobs: PackedPrompt | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A whole call; `index` is its place among the calls of its sample."""

    index: int
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    token_ids: list[int] | UnsetType = UNSET
    packed_logprobs: PackedTokens | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["toka-async"] = "toka-async"
    root: str
    parent: None = None
    max_model_len: int | None = None
    vocab_size: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str | msgspec.Raw  # Raw: the same, as JSON already


class Health(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Version(msgspec.Struct, frozen=True):
    version: str
