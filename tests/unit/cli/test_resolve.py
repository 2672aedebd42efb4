from __future__ import annotations

import pytest
import torch

from toka_async.checkpoint.spec import ModelError
from toka_async.cli.resolve import resolve
from toka_async.config import Config, load_config


def resolved(*overrides: str) -> Config:
    return resolve(load_config(None, overrides))


def test_on_a_cpu() -> None:
    config = resolved("model.device=cpu")
    assert (config.model.dtype, config.model.max_context) == ("float32", 2048)
    assert (config.schedule.max_seqs, config.schedule.max_tokens) == (256, 2048)
    assert (config.attention.backend, config.attention.num_threads) == ("reference", 1)
    assert isinstance(config.cache.num_tokens, int)
    assert (config.limits.max_bodies_mb, config.parallel.async_tp_min_tokens) == (512, 0)
    assert config.limits.max_unsent_mb == 512
    assert config.schedule.steps_ahead == "auto"  # as it runs


def test_connections_of_direct_clients_count_where_they_can_come() -> None:
    assert resolved("model.device=cpu").zmq.max_connections == "auto"
    with_direct = resolved("model.device=cpu", "zmq.bind=tcp://127.0.0.1:1", "limits.max_connections=100")
    assert isinstance(with_direct.zmq.max_connections, int)


def test_what_was_said_stays() -> None:
    config = resolved("model.device=cpu", "model.dtype=bfloat16", "cache.num_tokens=4096", "schedule.max_seqs=7")
    assert (config.model.dtype, config.cache.num_tokens, config.schedule.max_seqs) == ("bfloat16", 4096, 7)


def test_several_ranks() -> None:
    config = resolved("model.device=cpu", "parallel.pp=3")
    assert config.parallel.pp_micro_batches == 4
    assert config.cache.num_tokens == "auto"


def test_a_simulated_device() -> None:
    config = resolved("model.device=simulated")
    assert (config.model.device, config.model.dtype) == ("simulated", "auto")
    assert config.schedule.max_seqs == 8192


def test_on_a_gpu_what_is_measured_stays_automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 8 << 30
        major, minor = 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    config = resolved()
    assert (config.model.device, config.model.dtype) == ("cuda", "bfloat16")
    assert (config.cache.num_tokens, config.attention.backend) == ("auto", "auto")
    assert isinstance(config.schedule.max_seqs, int)


def test_what_could_not_be_served() -> None:
    with pytest.raises(ModelError, match=r"parallel\.tp=5"):
        resolved("parallel.tp=5")
    with pytest.raises(ModelError, match=r"model\.max_context=9999"):
        resolved("model.device=cpu", "model.max_context=9999")
