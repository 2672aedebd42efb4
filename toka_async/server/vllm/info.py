"""vLLM's routes that say what is served and how, with SGLang's names for the same at /server_info."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

import toka_async
from toka_async.messages import LogprobKind
from toka_async.openai.schemas import Schema
from toka_async.server.engine.facts import EngineFacts, name_dtype
from toka_async.server.http.query import Query
from toka_async.server.http.respond import SERVICE, json_response

FACTS: web.AppKey[EngineFacts] = web.AppKey("engine_facts", EngineFacts)
SIZE_QUERY: dict[str, Schema] = {"include_dp": {"type": "boolean", "default": True}}
FORMATS: tuple[Literal["text", "json"], ...] = ("text", "json")
INFO_QUERY: dict[str, Schema] = {"config_format": {"enum": list(FORMATS), "default": "text"}}


MODES = {  # vLLM has no name for the second
    LogprobKind.RAW: "raw_logprobs",
    LogprobKind.TEMPERATURE: "temperature",
    LogprobKind.PROCESSED: "processed_logprobs",
}


class WorldSize(msgspec.Struct, frozen=True):
    world_size: int


class WeightInfo(msgspec.Struct, frozen=True):
    weight_version: str


class PauseInfo(msgspec.Struct, frozen=True):
    is_paused: bool


class VllmModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """dtype: as torch names it."""

    model: str
    served_model_name: str
    dtype: str
    max_model_len: int
    logprobs_mode: str


class VllmParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """world_size: ranks of a replica; world_size_across_dp: of all."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    world_size: int
    world_size_across_dp: int


class VllmCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool


class VllmTransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    backend: str


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """weight_transfer_config: null unless weights can be changed."""

    model_config: VllmModelConfig
    parallel_config: VllmParallelConfig
    cache_config: VllmCacheConfig
    weight_transfer_config: VllmTransferConfig | None
    lora_config: None = None


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Both servers' /server_info: `vllm_config` is vLLM's, the rest SGLang's."""

    vllm_config: VllmConfig | str
    version: str
    model_path: str
    tokenizer_path: str
    served_model_name: str
    weight_version: str
    tp_size: int
    pp_size: int
    dp_size: int
    ep_size: int
    num_gpus: int
    context_length: int
    page_size: int
    max_total_num_tokens: int
    max_running_requests: int
    disaggregation_mode: Literal["null"] = "null"
    encoder_only: Literal[False] = False
    enable_memory_saver: Literal[False] = False


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """As in a model's tokenizer_config.json; absent is what the tokenizer has not."""

    tokenizer_class: Literal["PreTrainedTokenizerFast"] = "PreTrainedTokenizerFast"
    model_max_length: int
    bos_token: str | UnsetType = UNSET
    eos_token: str | UnsetType = UNSET
    unk_token: str | UnsetType = UNSET
    pad_token: str | UnsetType = UNSET
    chat_template: str | UnsetType = UNSET


async def get_world_size(request: web.Request) -> web.Response:
    """Returns the number of ranks, of all replicas unless `include_dp` is false."""
    facts, query = request.app[FACTS], Query(request, SIZE_QUERY)
    of_all = query.flag("include_dp", default=True)
    return json_response(WorldSize(facts.num_ranks if of_all else facts.ranks_per_replica))


async def get_weight_info(request: web.Request) -> web.Response:
    return json_response(WeightInfo(request.app[SERVICE].engine.control.weight_version))


async def is_paused(request: web.Request) -> web.Response:
    return json_response(PauseInfo(request.app[SERVICE].engine.control.is_paused))


async def get_server_info(request: web.Request) -> web.Response:
    """Answers 503 until the engine is ready."""
    service, facts = request.app[SERVICE], request.app[FACTS]
    has_text = Query(request, INFO_QUERY).choice("config_format", FORMATS, "text") == "text"
    ready, parallel, name = service.engine.check_serving(), facts.parallel, service.name
    config = VllmConfig(
        model_config=VllmModelConfig(
            model=name,
            served_model_name=name,
            dtype=f"torch.{name_dtype(ready)}",
            max_model_len=ready.max_context,
            logprobs_mode=MODES[service.defaults.logprob_kind],
        ),
        parallel_config=VllmParallelConfig(
            tensor_parallel_size=parallel.tp,
            pipeline_parallel_size=parallel.pp,
            data_parallel_size=parallel.dp,
            world_size=facts.ranks_per_replica,
            world_size_across_dp=facts.num_ranks,
        ),
        cache_config=VllmCacheConfig(
            block_size=ready.page_size, num_gpu_blocks=ready.num_pages, enable_prefix_caching=facts.caches_prefixes
        ),
        weight_transfer_config=VllmTransferConfig(backend="nccl") if facts.may_update else None,
    )
    info = ServerInfo(
        vllm_config=repr(config) if has_text else config,
        version=toka_async.__version__,
        model_path=name,
        tokenizer_path=name,
        served_model_name=name,
        weight_version=service.engine.control.weight_version,
        tp_size=parallel.tp,
        pp_size=parallel.pp,
        dp_size=parallel.dp,
        ep_size=parallel.ep,
        num_gpus=facts.num_ranks,
        context_length=ready.max_context,
        page_size=ready.page_size,
        max_total_num_tokens=ready.num_pages * ready.page_size,
        max_running_requests=ready.max_seqs,
    )
    return json_response(info)


async def get_tokenizer_info(request: web.Request) -> web.Response:
    """Returns the special tokens and the chat template, for clients that write prompts themselves."""
    service = request.app[SERVICE]
    tokens, template = service.tokenizer.special_tokens, service.chat_template
    return json_response(
        TokenizerInfo(
            model_max_length=service.limits().max_context,
            bos_token=tokens.get("bos_token", UNSET),
            eos_token=tokens.get("eos_token", UNSET),
            unk_token=tokens.get("unk_token", UNSET),
            pad_token=tokens.get("pad_token", UNSET),
            chat_template=UNSET if template is None else template.source,
        )
    )
