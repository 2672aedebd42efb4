from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from toka_async.config import Config, ConfigError, load_config
from toka_async.llm.engine_options import EngineArgs, list_overrides, make_config


def test_names_of_vllm_become_keys() -> None:
    config = make_config(
        "demo",
        None,
        {
            "tensor_parallel_size": 2,
            "dtype": torch.bfloat16,
            "max_model_len": 512,
            "gpu_memory_utilization": 0.5,
            "max_num_seqs": 8,
            "quantization": "fp8",
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "max_logprobs": -1,
            "logprobs_mode": "processed_logprobs",
            "tokenizer": "elsewhere",
            "model_impl": "transformers",
            "trust_remote_code": True,
        },
    )
    assert config.parallel.tp == 2
    assert config.model.dtype == "bfloat16"
    assert config.model.max_context == 512
    assert config.cache.memory_fraction == 0.5
    assert config.schedule.max_seqs == 8
    assert config.model.quantize == "fp8"
    assert not config.cache.prefix
    assert not config.graphs.enabled
    assert (config.limits.max_logprobs, config.model.logprobs_mode) == (-1, "processed")
    assert config.model.tokenizer == "elsewhere"
    assert (config.model.impl, config.model.trust_remote_code) == ("transformers", True)


def test_statistics_can_be_wanted() -> None:
    made = make_config("demo", None, {"disable_log_stats": False, "served_model_name": ["name"]})
    assert made.log.stats_interval == Config().log.stats_interval
    assert made.model.served_name == "name"


def test_engine_args_are_options_for_later() -> None:
    args = EngineArgs("demo", max_model_len=512)
    assert vars(args) == {"model": "demo", "max_model_len": 512}
    assert args.model == "demo"


def test_a_command_line_has_the_options_that_were_given() -> None:
    parser = argparse.ArgumentParser()
    assert EngineArgs.add_cli_args(parser) is parser
    parser.set_defaults(model="other")
    assert vars(parser.parse_args([])) == {"model": "other"}
    given = vars(parser.parse_args(["--model", "demo", "--max-model-len", "512", "--enforce-eager", "--seed", "3"]))
    assert given == {"model": "demo", "max_model_len": 512, "enforce_eager": True, "seed": 3}
    made = make_config("demo", None, {name: given[name] for name in ("max_model_len", "enforce_eager")})
    assert (made.model.max_context, made.graphs.enabled) == (512, False)


def test_a_command_line_has_the_names_and_types_of_vllm() -> None:
    """Scripts compute with them before `LLM` gets them."""
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser.add_argument_group("engine"))
    words = ["--model=7", "-dp=2", "-tp", "4", "--gpu-memory-utilization=0.5", "--max-model-len", "-1", "--dtype=half"]
    args = EngineArgs.from_cli_args(parser.parse_args(words))
    assert vars(args) == {
        "model": "7",
        "data_parallel_size": 2,
        "tensor_parallel_size": 4,
        "gpu_memory_utilization": 0.5,
        "max_model_len": -1,
        "dtype": "half",
    }
    options = {name: value for name, value in vars(args).items() if name != "model"}
    made = make_config("demo", None, options)
    assert (made.parallel.dp, made.parallel.tp, made.model.max_context) == (2, 4, "auto")
    with pytest.raises(ConfigError, match=r"parallel\.tp: expected integer from 1, got 'many'"):
        make_config("demo", None, vars(parser.parse_args(["--tp", "many"])))


def test_options_that_only_the_command_line_knows_are_refused_when_they_are_used() -> None:
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    with pytest.raises(ConfigError, match="merge the adapter"):
        make_config("demo", None, vars(parser.parse_args(["--enable-lora"])))


def test_a_model_is_a_name() -> None:
    model: Any = 3
    with pytest.raises(ConfigError, match="model: expected a directory, a hub id or demo, got 3"):
        make_config(model, None, {})


def test_keys_are_given_by_section_or_in_full() -> None:
    config = make_config("demo", None, {"cache": {"num_tokens": 4096, "prefix": False}, "schedule.max_seqs": 4})
    assert config.cache.num_tokens == 4096
    assert not config.cache.prefix
    assert config.schedule.max_seqs == 4


def test_options_win_over_the_file_and_the_file_over_our_choices(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[log]\nstats_interval = 7.0\n[schedule]\nmax_seqs = 4\n")
    config = make_config("demo", file, {"max_num_seqs": 8})
    assert config.log.stats_interval == 7.0
    assert config.schedule.max_seqs == 8
    assert make_config("demo", None, {}).log.stats_interval == 0


def test_a_file_for_a_server_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[server]\nport = 8000\n")
    with pytest.raises(ConfigError, match=r"server\.port=8000"):
        make_config("demo", file, {})


@pytest.mark.parametrize(
    "options",
    [
        {"trust_remote_code": False, "model_impl": "auto"},
        {"enable_lora": False, "revision": None, "quantization": None},
        {"tokenizer_mode": "auto", "skip_tokenizer_init": False, "enable_chunked_prefill": True},
        {"disable_log_stats": True, "enable_sleep_mode": True},
        {"max_model_len": -1, "max_logprobs": 20, "swap_space": 4, "max_lora_rank": 16, "revision": "main"},
        {"compilation_config": None, "hf_overrides": {}, "logits_processors": [], "served_model_name": None},
        {"structured_outputs_config": {"backend": "auto"}},
        {"anything": None},
    ],
)
def test_what_asks_for_nothing_is_taken(options: dict[str, Any]) -> None:
    assert make_config("demo", None, options) == make_config("demo", None, {})


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"tensor_paralel_size": 2}, ["tensor_paralel_size", "did you mean tensor_parallel_size?"]),
        ({"num_tokens": 2}, ["num_tokens", "did you mean"]),
        ({"enable_lora": True}, ["enable_lora", "merge the adapter"]),
        ({"revision": "v2"}, ["revision", "hf download"]),
        ({"kv_cache_memory_bytes": 10**9}, ["kv_cache_memory_bytes", "num_tokens"]),
        ({"compilation_config": 3}, ["compilation_config", "torch.compile"]),
        ({"logprobs_mode": "raw_logits"}, ["model.logprobs_mode", "raw_logits"]),
        ({"cache": 5}, ["cache: expected its keys", "got 5"]),
        ({"served_model_name": ["a", "b"]}, ["served_model_name: expected one value"]),
        ({"hf_overrides": {"x": 1}}, ["hf_overrides", "change config.json"]),
        ({"structured_outputs_config": {"backend": "outlines"}}, ["one library for grammars"]),
        ({"enforce_eager": "yes"}, ["enforce_eager", "True or False"]),
        ({"max_num_seqs": "many"}, ["schedule.max_seqs"]),
        ({"cache": {"num_token": 1}}, ["cache.num_token", "did you mean cache.num_tokens?"]),
        ({"zmq": {"bind": "tcp://127.0.0.1:1"}}, ["zmq.bind", "toka-async serve"]),
        ({"port": 8000}, ["server.port", "toka-async serve"]),
    ],
)
def test_anything_else_is_refused_with_the_fix(options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config("demo", None, options)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_configuration_survives_as_overrides() -> None:
    config = make_config("demo", None, {"cache": {"num_tokens": 4096, "prefix": False}, "dtype": "half"})
    assert load_config(None, list_overrides(config)) == config
    assert list_overrides(Config()) == []
