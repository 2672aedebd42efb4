"""The body of SGLang's POST /generate as Structs.

The names and defaults are those of SGLang 0.5 (sglang/srt/managers/io_struct.py, sglang/srt/sampling/).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, field

from toka_async.openai.fields import UNSUPPORTED, Unsupported
from toka_async.openai.requests import (
    LEAST_REPETITION,
    MAX_COUNT,
    MAX_IDS,
    MAX_LABEL,
    Bias,
    Count,
    Penalty,
    Priority,
    Salt,
    Stop,
    Stops,
    TokenIds,
    WireRequest,
)

HOTTEST = 1000  # temperature

Label = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL)]
Start = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
NumTop = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Texts = Annotated[list[str], Meta(min_length=1)]
# Token ids, or a list for each prompt.
_ID = {"type": "integer", "minimum": 0, "maximum": MAX_COUNT}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
InputIds = Annotated[
    list[Any], Meta(extra_json_schema={"minItems": 1, "anyOf": [{"items": each} for each in (_ID, _IDS)]})
]


class CustomParams(WireRequest, frozen=True, kw_only=True):
    """Parameters of SGLang's logits processors, of which it has one for thoughts itself."""

    thinking_budget: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None


class SglangSampling(WireRequest, frozen=True, kw_only=True):
    """SGLang's sampling parameters. A `top_k` of -1 is off."""

    unsupported: ClassVar[Unsupported] = {
        "stop_regex": ([], ""),
        "beam_width": (1,),
        "stream_interval": (1,),
        "watermark": (),
        # Of slow tokenizers alone. A fast one, and all are, has no such choice.
        "spaces_between_special_tokens": (True, False),
    }

    n: Count = 1
    max_new_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 128
    min_new_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    temperature: Annotated[float, Meta(ge=0, le=HOTTEST)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION, le=2)] = 1.0
    logit_bias: Bias = field(default_factory=dict)
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Stops = field(default_factory=list)
    stop_token_ids: Annotated[TokenIds, Meta(max_length=MAX_IDS)] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    custom_params: CustomParams = CustomParams()


class SglangRequest(WireRequest, frozen=True, kw_only=True):
    """POST /generate: `text` or `input_ids`, of one prompt or of many. A field that may be a list then has an item for
    each prompt. `session_id` is a label: requests go to the replica that has the beginning of their prompt anyway.
    """

    unsupported: ClassVar[Unsupported] = {
        **{name: UNSUPPORTED[name] for name in ("lora_path", "custom_logit_processor", "return_hidden_states")},
        "input_embeds": (),
        "image_data": ([],),
        "video_data": ([],),
        "audio_data": ([],),
        "modalities": ([],),
        "session_params": (),
        "token_ids_logprob": ([],),
        "return_sampling_mask": (False,),
        "sampling_logprobs_mode": (),
        "return_routed_experts": (False,),
        "routed_experts_start_len": (0,),
        "return_indexer_topk": (False,),
        "return_flat_raw_top_logprobs": (False,),
        "return_flat_raw_output_top_logprobs": (False,),
        "return_flat_raw_top_logprobs_b64": (False,),
        "return_entropy": (False,),
        "return_bytes": (False,),
        "require_reasoning": (False,),
        "max_thinking_tokens": (),
        "background": (False,),
        "log_metrics": (True,),
        "no_logs": (False,),
        "custom_labels": ({},),
        "watermark": (),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "routed_dp_rank": (),
        "data_parallel_rank": (),
    }

    text: str | Texts | None = None
    input_ids: InputIds | None = None
    sampling_params: SglangSampling | list[SglangSampling] = SglangSampling()
    return_logprob: bool | list[bool] = False
    logprob_start_len: Start | list[Start] = -1
    top_logprobs_num: NumTop | list[NumTop] = 0
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    rid: Label | list[Label] | None = None
    session_id: str | None = None
    priority: Priority = 0
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
