"""Turns a request into checked generation parameters, free of the names and defaults of the wire.

Checks what depends on the model and what ties two fields together. Knows no text, no prompt and no engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from toka_async.arrays import EMPTY, Int32, column, f32_column, i32_column
from toka_async.messages import LogprobKind, TokenSampling
from toka_async.openai.errors import bad_request
from toka_async.openai.prompts import check_vocabulary
from toka_async.openai.requests import (
    MAX_STOP_CHARS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    ChatBatchRequest,
    ChatRequest,
    CompletionRequest,
    DirectRequest,
    GenerationFields,
    LogprobsMode,
    SamplingFields,
    StreamOptions,
)
from toka_async.openai.structured import find_grammar

N = TypeVar("N", int, float)

COMPLETION_TOKENS = 16  # OpenAI's default of a completion's max_tokens
NOT_DIRECT = (
    "seed",
    "stream_options",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "logprobs_in_fingerprint",
    "packed_logprobs",
    "return_weight_versions",
    "request_id",
    "truncate_prompt_tokens",
)
KINDS: Mapping[LogprobsMode, LogprobKind] = {
    "raw": LogprobKind.RAW,
    "temperature": LogprobKind.TEMPERATURE,
    "processed": LogprobKind.PROCESSED,
}
LEAST_TEMPERATURE = 1e-5  # below, sampling is greedy, as in vLLM: float32 cannot hold 1 / temperature


class RequestLimits(msgspec.Struct, frozen=True):
    """The largest values that one request can have.

    max_context: tokens of prompt and completion together. cache_tokens: the same limit, from the KV cache's size.
    max_logprobs: likeliest tokens at a place.
    """

    max_context: int
    cache_tokens: int
    vocab_size: int
    max_n: int
    max_logprobs: int = 20


class Defaults(msgspec.Struct, frozen=True):
    """Values for what a request leaves out: the model's own, the server's, or OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    end_ids: tuple[int, ...] = ()
    logprob_kind: LogprobKind = LogprobKind.RAW
    special_tokens: Mapping[str, int] = {}  # text -> id; of those that a structural tag can name


@dataclass(frozen=True, slots=True)
class Truncation:
    """How prompts are cut to `num_kept` tokens (-1: as many as fit). keep_end: the last tokens stay."""

    num_kept: int
    keep_end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """A checked request.

    max_tokens: None means the rest of the context. num_prompt_logprobs: the response's `prompt_logprobs`, -1 for none;
    `sampling` may ask the engine for more because of an echo. num_prompt_copies: how often the answer repeats what it
    says of a prompt: once, or in each choice. truncation: None leaves prompts as they are. usage_in_chunks: each chunk
    of a stream has its sample's usage so far. pad_chunks: chunks hide the length of their text. pack_logprobs: samples'
    log-probs are arrays in the response's `system_fingerprint`. pack_columns: all log-probs are arrays in fields of
    their own. grammar_param: the field that outputs' grammar comes from. kept_tools: the functions whose
    calls that grammar keeps to schemas, with each one's schema and whether it is strict. has_text: the answer has the
    samples' texts.
    request_id: the client's; empty: it gave none. is_parsed: reasoning and tool calls are told from the text, which has
    the special tokens that mark them. thinking_budget: the most tokens of a thought, where `sampling.grammar` does not
    say so already; None or -1: any number.
    """

    n: int
    max_tokens: int | None
    seed: int
    sampling: TokenSampling
    stops: tuple[str, ...]
    include_stop: bool
    stop_token_ids: frozenset[int]
    skip_special_tokens: bool
    return_token_ids: bool
    name_token_ids: bool
    pack_logprobs: bool
    pack_columns: bool
    return_weight_versions: bool
    echo: bool
    num_prompt_logprobs: int
    stream: bool
    include_usage: bool
    usage_in_chunks: bool
    pad_chunks: bool
    priority: int
    cache_salt: str
    truncation: Truncation | None
    grammar_param: str = ""
    kept_tools: Mapping[str, tuple[Mapping[str, Any], bool]] = field(default_factory=dict)
    num_prompt_copies: int = 1
    has_text: bool = True
    spaces_between_special_tokens: bool = True
    request_id: str = ""
    is_parsed: bool = False
    thinking_budget: int | None = None


def completion_generation(request: CompletionRequest, limits: RequestLimits, defaults: Defaults) -> GenerationParams:
    """Raises ApiError (400), which names the field."""
    if request.best_of is not None and request.best_of != request.n:
        raise bad_request(f"'best_of' must equal n ({request.n}), got {request.best_of}", param="best_of")
    logprobs = int(request.logprobs) if request.logprobs is True else request.logprobs
    num_logprobs = count_logprobs(None if logprobs is False else logprobs, limits, "logprobs")
    max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    of_prompt = num_logprobs if request.echo and not request.logprobs_in_fingerprint else -1
    made = build_generation(request, limits, defaults, max_tokens, num_logprobs, of_prompt, request.echo)
    in_each_choice = request.echo or request.prompt_logprobs is not None or request.return_token_ids
    return replace(made, num_prompt_copies=made.n) if in_each_choice else made


def chat_generation(request: ChatRequest, limits: RequestLimits, defaults: Defaults) -> GenerationParams:
    """Raises ApiError (400), which names the field."""
    if request.top_logprobs and not (request.logprobs or request.logprobs_in_fingerprint):
        raise bad_request("'top_logprobs' needs logprobs: true", param="top_logprobs")
    both = request.max_tokens is not None and request.max_completion_tokens is not None
    if both and request.max_tokens != request.max_completion_tokens:
        raise bad_request("'max_completion_tokens' and max_tokens differ; give one", param="max_completion_tokens")
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    num_logprobs = -1
    if request.logprobs or request.top_logprobs:
        num_logprobs = count_logprobs(request.top_logprobs or 0, limits, "top_logprobs")
    made = build_generation(request, limits, defaults, max_tokens, num_logprobs, -1, False)
    in_each_choice = request.return_token_ids and (request.stream or isinstance(request, ChatBatchRequest))
    return replace(made, num_prompt_copies=made.n) if in_each_choice else made


def direct_generation(request: DirectRequest, limits: RequestLimits, defaults: Defaults) -> GenerationParams:
    """Refuses a seed, because each prompt has its own. Raises ApiError (400), which names the field."""
    for name in NOT_DIRECT:
        if getattr(request, name) not in (None, False):
            raise bad_request(f"'{name}' is no field of a direct submission", param=name)
    num_logprobs = count_logprobs(request.logprobs, limits, "logprobs")
    made = build_generation(request, limits, defaults, request.max_tokens, num_logprobs, -1, False)
    return replace(made, return_token_ids=True, return_weight_versions=True)


def build_generation(
    fields: GenerationFields,
    limits: RequestLimits,
    defaults: Defaults,
    max_tokens: int | None,
    num_logprobs: int,
    num_prompt_logprobs: int,
    echo: bool,
) -> GenerationParams:
    """Builds what completions and chat share."""
    if fields.logprobs_in_fingerprint:
        num_logprobs = max(0, num_logprobs)
    check_counts(fields, limits, max_tokens)
    shown_prompt_logprobs = count_logprobs(fields.prompt_logprobs, limits, "prompt_logprobs")
    num_prompt_logprobs = max(num_prompt_logprobs, shown_prompt_logprobs)
    check_packing(fields, num_logprobs, num_prompt_logprobs)
    stop_token_ids = np.array(fields.stop_token_ids, dtype=np.int32)
    check_vocabulary(stop_token_ids, limits.vocab_size, "stop_token_ids")
    options, grammar = (
        fields.stream_options or StreamOptions(),
        find_grammar(fields, defaults.special_tokens, defaults.end_ids),
    )
    sampling = build_sampling(fields, limits, defaults, num_logprobs, num_prompt_logprobs)
    return GenerationParams(
        n=fields.n,
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if fields.seed is None else fields.seed,
        sampling=msgspec.structs.replace(sampling, grammar=grammar.text),
        stops=parse_stops(fields.stop),
        include_stop=fields.include_stop_str_in_output,
        stop_token_ids=frozenset(fields.stop_token_ids),
        skip_special_tokens=fields.skip_special_tokens,
        return_token_ids=fields.return_token_ids,
        name_token_ids=fields.return_tokens_as_token_ids,
        pack_logprobs=fields.logprobs_in_fingerprint,
        pack_columns=fields.packed_logprobs,
        return_weight_versions=fields.return_weight_versions,
        echo=echo,
        num_prompt_logprobs=shown_prompt_logprobs,
        stream=fields.stream,
        include_usage=options.include_usage,
        usage_in_chunks=options.continuous_usage_stats,
        pad_chunks=options.include_obfuscation,
        priority=fields.priority,
        cache_salt=fields.cache_salt or "",
        truncation=build_truncation(fields),
        grammar_param=grammar.param,
        spaces_between_special_tokens=fields.spaces_between_special_tokens,
        request_id=fields.request_id or "",
        thinking_budget=fields.thinking_token_budget,
    )


def count_logprobs(asked: int | None, limits: RequestLimits, name: str) -> int:
    """Returns how many likeliest tokens a field asks for; -1 for none at all, not even the chosen one's log-prob.

    Raises ApiError (400) that names the field.
    """
    if asked is None:
        return -1
    number = limits.vocab_size if asked < 0 else asked
    if number > limits.max_logprobs:
        most = f"{limits.max_logprobs} (limits.max_logprobs)"
        raise bad_request(f"'{name}' can be at most {most}, got {asked}", param=name)
    return number


def check_packing(fields: GenerationFields, num_logprobs: int, num_prompt_logprobs: int) -> None:
    """Raises ApiError (400)."""
    name = "packed_logprobs"
    if fields.packed_logprobs and max(num_logprobs, num_prompt_logprobs) < 0:
        raise bad_request(f"'{name}' needs logprobs or prompt_logprobs", param=name)
    if fields.packed_logprobs and fields.logprobs_in_fingerprint:
        raise bad_request(f"'{name}' and logprobs_in_fingerprint are two forms of the same; give one", param=name)


def build_truncation(fields: GenerationFields) -> Truncation | None:
    if fields.truncate_prompt_tokens is None:
        return None
    if fields.truncate_prompt_tokens == 0:
        raise bad_request("'truncate_prompt_tokens' must be 1 or more, or -1", param="truncate_prompt_tokens")
    return Truncation(fields.truncate_prompt_tokens, fields.truncation_side == "left")


def truncate_prompt(prompt: Int32, how: Truncation, limits: RequestLimits, max_tokens: int | None) -> Int32:
    """Cuts a prompt [p]; -1 leaves room for `max_tokens`, or for one token."""
    room = min(limits.max_context, limits.cache_tokens) - (1 if max_tokens is None else max_tokens)
    num_kept = how.num_kept if how.num_kept > 0 else max(1, room)
    return prompt[-num_kept:] if how.keep_end else prompt[:num_kept]


def check_counts(fields: GenerationFields, limits: RequestLimits, max_tokens: int | None) -> None:
    if fields.n > limits.max_n:
        raise bad_request(f"'n' can be at most {limits.max_n}, got {fields.n}", param="n")
    most = limits.max_context if max_tokens is None else max_tokens
    if fields.min_tokens > most:
        raise bad_request(f"'min_tokens' ({fields.min_tokens}) is above max_tokens ({most})", param="min_tokens")
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("'stream_options' needs stream: true", param="stream_options")
    of_whole = (
        ("prompt_logprobs", fields.prompt_logprobs is not None),
        ("logprobs_in_fingerprint", fields.logprobs_in_fingerprint),
    )
    for name, is_asked in of_whole if fields.stream else ():
        if is_asked:
            raise bad_request(f"'{name}' is not supported with stream: true", param=name)


def build_sampling(
    fields: SamplingFields, limits: RequestLimits, defaults: Defaults, num_logprobs: int, num_prompt_logprobs: int
) -> TokenSampling:
    """Builds the engine's sampling parameters. A top_k of -1 and of 0 both mean off."""
    ends = set(fields.stop_token_ids) | (set() if fields.ignore_eos else set(defaults.end_ids))
    bias = parse_bias(fields.logit_bias, limits.vocab_size)
    allowed = np.unique(np.array(fields.allowed_token_ids or (), dtype=np.int32))
    check_vocabulary(allowed, limits.vocab_size, "allowed_token_ids")
    if allowed.size and fields.min_tokens and ends.issuperset(allowed.tolist()):
        raise bad_request(
            "'allowed_token_ids' are all end tokens, which min_tokens forbids at first", param="allowed_token_ids"
        )
    temperature = choose(fields.temperature, defaults.temperature)
    temperature = temperature if temperature >= LEAST_TEMPERATURE else 0.0
    kind = defaults.logprob_kind if fields.logprobs_mode is None else KINDS[fields.logprobs_mode]
    return TokenSampling(
        temperature=temperature,
        top_p=choose(fields.top_p, defaults.top_p),
        top_k=max(choose(fields.top_k, defaults.top_k), 0),
        min_p=choose(fields.min_p, defaults.min_p),
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=choose(fields.repetition_penalty, defaults.repetition_penalty),
        min_tokens=fields.min_tokens,
        end_ids=i32_column(sorted(ends)) if ends else EMPTY,
        bias_ids=i32_column(bias.keys()),
        bias_values=f32_column(bias.values()),
        allowed_ids=column(allowed) if allowed.size else EMPTY,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        logprob_kind=kind,
        # Nobody drew the prompt's tokens: neither penalties nor filters have a meaning for them.
        prompt_temperature=1.0 if kind is LogprobKind.RAW else temperature or 1.0,
    )


def choose(value: N | None, default: N) -> N:
    return default if value is None else value


def parse_bias(wire: dict[str, float], vocab_size: int) -> dict[int, float]:
    """Returns token id -> bias. Raises ApiError (400) for keys that are no ids of the vocabulary."""
    bias: dict[int, float] = {}
    for key, value in wire.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < vocab_size):
            raise bad_request(
                f"'logit_bias' has the key {key[:40]!r}; token ids of this model are 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        bias[int(key)] = value
    return bias


def parse_stops(stop: str | list[str]) -> tuple[str, ...]:
    """Returns the distinct stop strings, in order. Raises ApiError (400) for empty, too long or too many ones."""
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise bad_request(f"'stop' can have at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    if any(not text for text in stops):
        raise bad_request("'stop' must not hold an empty string", param="stop")
    if any(len(text) > MAX_STOP_LENGTH for text in stops):
        raise bad_request(f"'stop' strings can have at most {MAX_STOP_LENGTH} characters", param="stop")
    if (num_chars := sum(map(len, stops))) > MAX_STOP_CHARS:
        raise bad_request(
            f"'stop' strings can have at most {MAX_STOP_CHARS} characters together, got {num_chars}", param="stop"
        )
    return tuple(dict.fromkeys(stops))


def check_text(limits: RequestLimits, num_chars: int, longest: int, param: str) -> None:
    """Raises ApiError (400) for a text that cannot fit even if all its tokens have `longest` characters.

    This refuses a hopeless text before it is tokenized, with the error of `token_budget`.
    """
    room, least = min(limits.max_context, limits.cache_tokens), -(-num_chars // longest)
    if least > room:
        raise bad_request(
            f"at most {room} tokens fit, but the prompt has at least {least} tokens; shorten it",
            param=param,
            code="context_length_exceeded",
        )


def check_text_size(text: str, max_mb: int, param: str) -> None:
    """Raises ApiError (400) for a text of more than `max_mb` MiB in UTF-8."""
    most = max_mb << 20
    if 4 * len(text) > most and (num_bytes := len(text.encode("utf-8", "surrogatepass"))) > most:
        raise bad_request(
            f"'{param}': a text of {num_bytes} bytes is too long to be tokenized; limits.max_text_mb is {max_mb} MiB. "
            "Shorten it, or send token ids",
            param=param,
            code="text_too_long",
        )


def token_budget(limits: RequestLimits, num_prompt: int, max_tokens: int | None, param: str) -> int:
    """Returns how many tokens may follow a prompt of `num_prompt` tokens; `param` is the prompt's field.

    Raises ApiError (400) with the numbers when prompt and completion do not fit the context or the cache.
    """
    room = min(limits.max_context, limits.cache_tokens)
    what = "maximum context length" if room == limits.max_context else "KV cache's size"
    left = room - num_prompt
    if left < (1 if max_tokens is None else 0):
        raise bad_request(
            f"the {what} is {room} tokens, but the prompt has {num_prompt} tokens; shorten it",
            param=param,
            code="context_length_exceeded",
        )
    if max_tokens is None:
        return left
    if max_tokens > left:
        raise bad_request(
            f"the {what} is {room} tokens, but {num_prompt + max_tokens} are asked for: {num_prompt} of the prompt "
            f"and {max_tokens} of the completion; lower max_tokens or shorten the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return max_tokens
