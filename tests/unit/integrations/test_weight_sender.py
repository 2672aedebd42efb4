from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.drivers.web_server import WebServer, web_server
from toka_async.control import Control, LoadTensors, ShmBucket
from toka_async.integrations.weight_sender import WeightSender, WeightSendingError
from toka_async.transfer.shared import FOLDER
from toka_async.transfer.tensors import read_infos

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.zeros(3)}


def loads(server: WebServer) -> list[LoadTensors]:
    actions: list[Any] = [message.action for message in server.scheduler.log if isinstance(message, Control)]
    return [action for action in actions if isinstance(action, LoadTensors)]


async def test_weights_go_through_shared_memory() -> None:
    async with web_server(admin=True) as server:
        sender = WeightSender(server.url + "/v1", bucket_bytes=48)
        await asyncio.to_thread(sender.pause)
        await asyncio.to_thread(sender.send, TENSORS.items(), "v1")
        await asyncio.to_thread(sender.resume)
        acts = ["Pause", "BeginUpdate", "LoadTensors", "LoadTensors", "VerifyUpdate", "CommitUpdate", "Resume"]
        assert server.scheduler.acts == acts
        first, second = loads(server)
        assert (first.names, second.names) == (("a", "b"), ("c",))
        assert [str(info.dtype) for info in read_infos(first.names, first.dtypes, first.shapes)] == [
            "torch.float32",
            "torch.bfloat16",
        ]
        assert isinstance(first.source, ShmBucket)
        assert (FOLDER / first.source.name).exists()
        assert (await asyncio.to_thread(sender.ask, "/weight_info")) == {"weight_version": "v1"}
        assert await asyncio.to_thread(sender.read_checksums)
        sender.close()
        assert not (FOLDER / first.source.name).exists()


async def test_what_the_server_refuses_is_said() -> None:
    async with web_server() as server:
        sender = WeightSender(server.url)
        with pytest.raises(WeightSendingError, match=r"/pause\?mode=keep: 404: .*server.admin=true"):
            await asyncio.to_thread(sender.pause)
    with pytest.raises(WeightSendingError, match="/health: "):
        sender.ask("/health")
