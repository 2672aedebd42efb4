from __future__ import annotations

from pathlib import Path

import pytest

from toka_async.cli.overrides import complete_overrides, translate_options
from toka_async.config import ConfigError


@pytest.mark.parametrize(
    ("written", "overrides"),
    [
        ("--server.port 8000", "server.port=8000"),
        ("--server.port=8000", "server.port=8000"),
        ("--cache.prefix --port 1", "cache.prefix=true server.port=1"),
        ("--cache.prefix false", "cache.prefix=false"),
        ("--cache.prefix False m", "cache.prefix=false m"),
        ("a --port=1 --host ::1 b", "a server.port=1 server.host=::1 b"),
        ("-tp 2 -pp 3 -dp=4", "parallel.tp=2 parallel.pp=3 parallel.dp=4"),
        ("--tensor_parallel_size 2", "parallel.tp=2"),
        ("--dtype half --max-model-len 8192", "model.dtype=float16 model.max_context=8192"),
        ("--model-impl vllm --trust-remote-code", "model.impl=native model.trust_remote_code=true"),
        ("--mamba-ssm-cache-dtype float16", "cache.state_dtype=float16"),
        ("--enforce-eager m", "graphs.enabled=false m"),
        ("--no-enable-prefix-caching", "cache.prefix=false"),
        ("--load-format dummy", "model.load=random"),
        ("--unknown 1 -x", "--unknown 1 -x"),
        ("a -- --port 1", "a -- --port 1"),
    ],
)
def test_options(written: str, overrides: str) -> None:
    assert translate_options(written.split()) == overrides.split()


def test_the_commands_own_options_are_its_own() -> None:
    arguments = ["--model", "m", "--seed", "1", "--port", "2"]
    assert translate_options(arguments, {"--model", "--seed"}) == ["--model", "m", "--seed", "1", "server.port=2"]


def test_what_has_no_key_is_answered() -> None:
    with pytest.raises(ConfigError, match=r"^--api-key: set TOKA_API_KEYS"):
        translate_options(["--api-key", "x"])
    with pytest.raises(ConfigError, match=r"^--port: expected a value"):
        translate_options(["--port"])
    with pytest.raises(ConfigError, match=r"^--host: expected a value"):
        translate_options(["--host", "--port", "1"])
    with pytest.raises(ConfigError, match=r"^rope_scaling: leave it out"):
        complete_overrides(["rope_scaling=x"], has_model=True)


@pytest.mark.parametrize(
    ("written", "overrides"),
    [
        ("models/qwen", "model.path=models/qwen"),
        ("a.b=1 Qwen/Qwen2.5-0.5B", "a.b=1 model.path=Qwen/Qwen2.5-0.5B"),
        ("model=m kv_cache_num_tokens=5 tp_size=2", "model.path=m cache.num_tokens=5 parallel.tp=2"),
        ("use_hydragen=F use_cudagraphs=T", "schedule.group_min_seqs=0 graphs.enabled=true"),
        ("server.port", "server.port"),  # a key without a value is no model
    ],
)
def test_words(written: str, overrides: str) -> None:
    assert complete_overrides(written.split(), has_model=True) == overrides.split()


def test_a_bare_word_is_no_model_where_none_is_served() -> None:
    assert complete_overrides(["x"], has_model=False) == ["x"]


def test_a_configuration_file_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.touch()
    with pytest.raises(ConfigError, match=r"use --config .*c\.toml"):
        complete_overrides([str(path)], has_model=True)
