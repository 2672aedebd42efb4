from __future__ import annotations

import pytest

from toka_async.config import ConfigError
from toka_async.integrations.hosted_engine import HostedEngine
from toka_async.ray.engine import ReplicaStartError


async def test_an_engine_takes_requests_and_commands_and_ends() -> None:
    engine = HostedEngine("demo", {"device": "simulated", "max_model_len": 256, "enforce_eager": True})
    await engine.start()
    try:
        assert engine.url.startswith("http://127.0.0.1:")
        assert engine.max_context == 256
        (sample,) = (await engine.client.generate([3, 4], max_tokens=5, ignore_eos=True)).samples
        assert sample.token_ids.size == 5
        await engine.trainer.pause("keep")
        assert (await engine.trainer.state()).is_paused
    finally:
        await engine.stop()


async def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ConfigError, match=r"zmq\.bind: it is chosen for each replica"):
        HostedEngine("demo", {"zmq": {"bind": "tcp://*:5"}})
    engine = HostedEngine("/no/such/folder", {})
    with pytest.raises(ReplicaStartError, match="no such directory"):
        await engine.start()
