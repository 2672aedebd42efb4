"""The body of vLLM's POST /inference/v1/generate as Structs: token ids in, token ids out.

The names are those of vLLM 0.33 (vllm/entrypoints/scale_out/token_in_token_out/protocol.py, vllm/sampling_params.py).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from toka_async.openai.fields import UNSUPPORTED, Unsupported
from toka_async.openai.requests import (
    MAX_LABEL,
    Count,
    NumLogprobs,
    Priority,
    PromptIds,
    Salt,
    SamplingFields,
    StreamOptions,
    WireRequest,
)


class VllmSampling(SamplingFields, frozen=True, kw_only=True):
    """vLLM's SamplingParams. Here None means vLLM's default, whatever the model's own is.

    max_tokens: None means the rest of the context.
    """

    unsupported: ClassVar[Unsupported] = {
        **{name: UNSUPPORTED[name] for name in ("bad_words", "logprob_token_ids")},
        "extra_args": ({},),
        "repetition_detection": (),
        "prompt_logprob_token_ids": (),
        "prompt_logprob_start": (0,),
        "trace_decode_token_ids": (),
        "routed_experts_prompt_start": (0,),
        "skip_reading_prefix_cache": (False,),
        "watermarking": (False,),
        "stream_interval": (1,),
        # How vLLM's engine hands samples to its own server, which decides by `stream`: no client sees a difference.
        "output_kind": (0, 1, 2),
        "flat_logprobs": (False, True),
    }

    max_tokens: Count | None = None
    logprobs: NumLogprobs | None = None
    detokenize: bool = True


class TokensRequest(WireRequest, frozen=True, kw_only=True):
    """POST /inference/v1/generate. `prompts` parses `token_ids`."""

    unsupported: ClassVar[Unsupported] = {
        "token_offsets": (),
        "features": (),
        "content_parts": ([],),
        "parse_context": (),
        "reasoning_ended": (),
        "reasoning_parser_kwargs": (),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
    }

    token_ids: PromptIds
    sampling_params: VllmSampling
    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_LABEL)] | None = None
    model: str | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    priority: Priority = 0
    cache_salt: Salt | None = None
