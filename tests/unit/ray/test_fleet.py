from __future__ import annotations

from typing import Any

import pytest

from toka_async.config import ConfigError, load_config
from toka_async.ray.fleet import count_gpus, list_overrides


def test_options_are_keys_or_names_of_other_engines() -> None:
    options: dict[str, Any] = {
        "cache": {"num_tokens": 4096, "prefix": False},
        "schedule.max_seqs": 8,
        "max_model_len": 512,
        "dtype": "half",
        "enforce_eager": True,
    }
    assert list_overrides("/models/llama", options) == [
        "model.path=/models/llama",
        "cache.num_tokens=4096",
        "cache.prefix=false",
        "schedule.max_seqs=8",
        "model.max_context=512",
        "model.dtype=float16",
        "graphs.enabled=false",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_modl_len": 5}, "unknown option 'max_modl_len'"),
        ({"zmq": {"bind": "tcp://*:5"}}, "zmq.bind: it is chosen for each replica"),
        ({"port": 8000}, "server.port: it is chosen for each replica"),
        ({"enable_lora": True}, "LoRA"),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list_overrides("demo", options)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["parallel.tp=2", "parallel.pp=2"], 4),
        (["parallel.dp=3"], 3),
        (["model.device=simulated", "parallel.tp=2"], 0),
        (["model.device=simulated", "simulated.gpu=pretended", "parallel.tp=2"], 2),
        (["model.device=cpu"], 0),
    ],
)
def test_a_replica_takes_a_gpu_for_each_rank(words: list[str], count: int) -> None:
    assert count_gpus(load_config(None, words)) == count
