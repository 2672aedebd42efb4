from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.drivers.web_server import NAME, TEMPLATE, WebServer, web_server
from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.config import ParallelConfig
from toka_async.messages import RankDevice
from toka_async.server.vllm.info import FACTS


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    ranks = (RankDevice(rank=0, device="a GPU", dtype="bfloat16, cache in fp8"),)
    async with web_server(FakeScheduler(ready=msgspec.structs.replace(READY, ranks=ranks))) as running:
        parallel = ParallelConfig(dp=3, tp=2, pp=2)
        running.app._state[FACTS] = replace(running.app[FACTS], parallel=parallel)
        yield running


async def ask(server: WebServer, path: str) -> Any:
    status, answer = await server.get(path)
    assert status == 200, answer
    return answer


async def test_the_world(server: WebServer) -> None:
    assert await ask(server, "/get_world_size") == {"world_size": 12}
    assert await ask(server, "/get_world_size?include_dp=false") == {"world_size": 4}
    assert (await server.get("/get_world_size?include_dp=perhaps"))[0] == 400


async def test_the_weights(server: WebServer) -> None:
    assert await ask(server, "/weight_info") == {"weight_version": "default"}
    assert await ask(server, "/is_paused") == {"is_paused": False}


async def test_the_configuration(server: WebServer) -> None:
    info = await ask(server, "/server_info?config_format=json")
    config = info["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.bfloat16"
    assert (config["model_config"]["model"], config["model_config"]["max_model_len"]) == (NAME, 512)
    assert config["parallel_config"]["world_size_across_dp"] == 12
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert config["weight_transfer_config"] is None
    assert [info[name] for name in ("tp_size", "pp_size", "dp_size", "num_gpus", "max_total_num_tokens")] == [
        *(2, 2, 3, 12),
        256 * 16,
    ]
    assert await ask(server, "/get_server_info?config_format=json") == info
    text = (await ask(server, "/server_info"))["vllm_config"]
    assert "torch.bfloat16" in text


async def test_the_transfer_of_weights_is_there_for_admins() -> None:
    async with web_server(admin=True) as server:
        config = (await ask(server, "/server_info?config_format=json"))["vllm_config"]
        assert config["weight_transfer_config"] == {"backend": "nccl"}


async def test_it_needs_the_engine() -> None:
    async with web_server(FakeScheduler(ready=None)) as server:
        assert (await server.get("/server_info"))[0] == 503
        assert (await server.get("/liveness"))[0] == 200


async def test_the_tokenizer(server: WebServer) -> None:
    info = await ask(server, "/tokenizer_info")
    special = {name: text for name, text in server.tokenizer.special_tokens.items() if name.endswith("_token")}
    assert info == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "chat_template": TEMPLATE,
        **special,
    }
    async with web_server(template=None) as other:
        assert "chat_template" not in await ask(other, "/tokenizer_info")
