from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from toka_async.config import Config, ConfigError, load_config
from toka_async.config.load import describe, list_settings

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "test.toml"
    path.write_text(text, encoding="utf-8")
    return path


def check_line(parts: list[str], file: Path | None, overrides: Sequence[str] = ()) -> None:
    """What is loaded is an error of one line with these parts."""
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


def test_without_a_file_everything_is_default() -> None:
    config = load_config()
    assert config == Config()
    assert (config.server.host, config.server.port, config.limits.max_n) == ("127.0.0.1", 10210, 16384)
    assert (config.limits.max_body_mb, config.cache.page_size, config.cache.num_tokens) == (64, 16, "auto")
    assert (config.parallel.dp, config.parallel.pp, config.parallel.tp) == (1, 1, 1)


def test_file_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\npath = "some/where"\n[server]\nport = 1\n[log]\nstats_interval = 2\n')
    config = load_config(path, ["server.port=2", "server.host=::1"])
    assert config.model.path == "some/where"
    assert (config.server.port, config.server.host, config.log.stats_interval) == (2, "::1", 2.0)


def test_the_last_override_wins() -> None:
    assert load_config(None, ["server.port=1", "server.port=2"]).server.port == 2


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("model.path=a=b c", "model", "path", "a=b c"),
        ("model.path=12", "model", "path", "12"),
        ("model.served_name=", "model", "served_name", ""),
        ("model.dtype=bfloat16", "model", "dtype", "bfloat16"),
        ("cache.num_tokens=auto", "cache", "num_tokens", "auto"),
        ("cache.num_tokens=4096", "cache", "num_tokens", 4096),
        ("cache.prefix=false", "cache", "prefix", False),
        ("server.drain_timeout=1.5", "server", "drain_timeout", 1.5),
        ("server.drain_timeout=3", "server", "drain_timeout", 3.0),
    ],
)
def test_overrides_take_the_type_of_the_field(override: str, section: str, field: str, value: object) -> None:
    found = getattr(getattr(load_config(None, [override]), section), field)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("server.prot=1", ["'server.prot'", "did you mean server.port?"]),
        ("port=1", ["'port'", "did you mean server.port?"]),
        ("sever.port=1", ["'sever.port'", "did you mean server.port?"]),
        ("max_seqs", ["'max_seqs'", "section.key=value", "schedule.max_seqs"]),
        ("=1", ["unknown key ''"]),
        ("compile.graphs=true", ["compile.graphs is now graphs.enabled"]),
        ("compile.enabled=true", ["compile.enabled is gone: leave it out"]),
        ("compile.other=1", ["unknown key 'compile.other'"]),
        ("server.a\nb=1", [r"'server.a\nb'"]),
        ("server.port=x", ["server.port", "integer from 0 to 65535", "'x'"]),
        ("server.port=70000", ["server.port", "integer from 0 to 65535", "'70000'"]),
        ("server.port=1.5", ["server.port", "integer"]),
        ("model.dtype=flot32", ["model.dtype", "'flot32'", "did you mean float32?"]),
        ("cache.prefix=maybe", ["cache.prefix", "true or false", "'maybe'"]),
        ("cache.num_tokens=0", ["cache.num_tokens", "auto or integer from 1", "'0'"]),
        ("cache.num_tokens=9000000000", ["auto or integer from 1 to 2147483647", "'9000000000'"]),
        ("server.port", ["expected server.port=VALUE"]),
        ("cache.num_tokens=8", ["cache.num_tokens", "cache.page_size (16)"]),
        ("cache.memory_fraction=0", ["cache.memory_fraction", "above 0"]),
        ("schedule.max_seqs=-1", ["schedule.max_seqs", "'-1'"]),
        (f"schedule.max_seqs={10**30}", ["schedule.max_seqs"]),
        ("server.drain_timeout=inf", ["server.drain_timeout", "'inf'"]),
        ("server.drain_timeout=1e7", ["server.drain_timeout", "'1e7'"]),
        ("server.hang_timeout=1e300", ["server.hang_timeout", "to 1000000"]),
        ("server.step_timeout=1e300", ["server.step_timeout"]),
        ("limits.client_timeout=1e300", ["limits.client_timeout"]),
        ("server.drain_timeout=nan", ["server.drain_timeout", "'nan'"]),
        ("model.path=", ["model.path"]),
        ("model.path=a\x00b", ["model.path", "NUL"]),
    ],
)
def test_a_wrong_override_is_one_line_that_names_it(override: str, parts: list[str]) -> None:
    check_line(parts, None, [override])


def test_several_replicas_and_ranks_can_be_served() -> None:
    parallel = load_config(None, ["parallel.dp=3", "parallel.pp=4", "parallel.tp=2"]).parallel
    assert (parallel.dp, parallel.pp, parallel.tp) == (3, 4, 2)


def test_micro_batches_are_one_more_than_stages() -> None:
    counts = {1: 1, 2: 3, 8: 9}
    for pp, expected in counts.items():
        assert load_config(None, [f"parallel.pp={pp}"]).parallel.num_micro_batches == expected
    assert load_config(None, ["parallel.pp=2", "parallel.pp_micro_batches=7"]).parallel.num_micro_batches == 7
    with pytest.raises(ConfigError, match=r"^parallel\.pp_micro_batches: needs parallel\.pp above 1, or auto$"):
        load_config(None, ["parallel.pp_micro_batches=2"])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[model\n", ["test.toml", "line 1"]),
        ("\n[servr]\nport = 1\n", ["'servr'", "did you mean server?"]),
        ("port = 1\n", ["'port'", "in a section", "did you mean server.port?"]),
        ("model = 3\n", ["model", "section"]),
        ("[server]\nprot = 1\n", ["'server.prot'", "server.port"]),
        ("[server]\nport = '1'\n", ["server.port", "'1'"]),
        ("[model]\npath = 3\n", ["model.path", "text"]),
        ("[server.port]\nx = 1\n", ["server.port", "integer"]),
        ("[server]\ndrain_timeout = nan\n", ["server.drain_timeout"]),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    check_line(parts, write(tmp_path, text))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="directory"):
        load_config(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.toml: not valid TOML"):
        load_config(tmp_path / "bytes.toml")


def test_all_bodies_together_have_room_for_the_largest() -> None:
    with pytest.raises(
        ConfigError, match=r"^limits\.max_bodies_mb: expected at least limits\.max_body_mb \(64\), got 63"
    ):
        load_config(None, ["limits.max_bodies_mb=63"])
    assert load_config(None, ["limits.max_bodies_mb=64"]).limits.max_bodies_mb == 64
    assert load_config(None, ["limits.max_body_mb=640"]).limits.max_bodies_mb == "auto"


def test_a_step_must_have_room_for_every_sequence() -> None:
    with pytest.raises(ConfigError, match=r"^schedule\.max_tokens: expected at least schedule\.max_seqs \(64\)"):
        load_config(None, ["schedule.max_seqs=64", "schedule.max_tokens=63"])
    assert load_config(None, ["schedule.max_seqs=64", "schedule.max_tokens=64"]).schedule.max_tokens == 64


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention.backend=triton", "model.device=cpu"], "=triton: needs model.device=cuda, got cpu; use auto"),
        (["attention.backend=flashinfer", "model.device=simulated"], "=flashinfer: needs model.device=cuda"),
        (["attention.backend=flashinfer", "model.dtype=float32"], "=flashinfer: expected model.dtype bfloat16"),
    ],
)
def test_attention_on_a_gpu_needs_one(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^attention.backend{message}"):
        load_config(None, overrides)
    assert load_config(None, overrides[:1]).attention.backend in message


def test_a_group_has_two_sequences() -> None:
    with pytest.raises(ConfigError, match=r"^schedule\.group_min_seqs: expected 0 for none, or at least 2, got 1"):
        load_config(None, ["schedule.group_min_seqs=1"])
    assert load_config(None, ["schedule.group_min_seqs=0"]).schedule.group_min_seqs == 0


def test_shards_of_tensor_ranks_need_some() -> None:
    key = "parallel.async_tp_min_tokens"
    with pytest.raises(ConfigError, match=rf"^{key}=64: needs parallel\.tp of at least 2; use auto or 0"):
        load_config(None, [f"{key}=64"])
    with pytest.raises(ConfigError, match=rf"^{key}=64: needs a device that computes"):
        load_config(None, [f"{key}=64", "parallel.tp=2", "model.device=simulated"])
    assert load_config(None, [f"{key}=64", "parallel.tp=2"]).parallel.async_tp_min_tokens == 64
    assert load_config(None, [f"{key}=0"]).parallel.async_tp_min_tokens == 0
    assert Config().parallel.async_tp_min_tokens == "auto"


def test_describe_has_every_field_with_type_default_and_read_meaning() -> None:
    fields = {field.key: field for field in describe()}
    config = Config()
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(type(getattr(config, section.name))):
            described = fields.pop(f"{section.name}.{field.name}")
            assert described.type
            assert described.meaning
            assert described.default == str(field.default).lower()
    assert not fields


def test_each_meaning_stands_alone() -> None:
    for field in describe():
        assert not re.search(r"likewise|\bas max_|^its ", field.meaning), field.key


def test_describe_shows_effective_values() -> None:
    fields = {field.key: field.default for field in describe(load_config(None, ["server.port=7", "cache.prefix=0"]))}
    assert fields["server.port"] == "7"
    assert fields["cache.prefix"] == "false"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_shipped_files_load(path: Path) -> None:
    assert load_config(path).model.path
    assert {"demo.toml", "qwen.toml", "llama-1b.toml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.nodes=2", "parallel.pp=2"], "cluster.nodes=2: needs cluster.address"),
        (["cluster.interface=eth0"], "cluster: its keys need cluster.nodes above 1"),
        (
            ["cluster.nodes=2", "cluster.address=tcp://a:1", "parallel.tp=16"],
            "parallel.pp=1: expected a multiple of cluster.nodes=2, since every machine has equally many stages; "
            "parallel.tp=16 divides a stage within its machine",
        ),
        (["cluster.nodes=2", "cluster.address=tcp://a:1", "parallel.pp=3"], "parallel.pp=3: expected a multiple"),
    ],
)
def test_machines_have_equally_many_stages(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert message in str(caught.value)


def test_settings_of_machines_leave_out_which_one_it_is() -> None:
    one = load_config(None, ["parallel.pp=2", "cluster.nodes=2", "cluster.address=tcp://a:1"])
    other = load_config(None, ["parallel.pp=2", "cluster.nodes=2", "cluster.address=tcp://b:1"])
    assert list_settings(one) == list_settings(other) != list_settings(Config())


def test_keys_of_the_simulated_device_need_it() -> None:
    with pytest.raises(ConfigError, match=r"model\.device=simulated"):
        load_config(None, ["simulated.step_ms=1"])
    keys = ["model.device=simulated", "simulated.step_ms=1.5", "simulated.end_rate=0.01"]
    simulated = load_config(None, keys).simulated
    assert (simulated.step_ms, simulated.end_rate) == (1.5, 0.01)


@pytest.mark.parametrize(
    ("override", "uses"),
    [
        ("attention.backend=flashinfer", "auto, reference or triton"),
        ("schedule.group_min_seqs=8", "auto or 0"),
        ("parallel.async_tp_min_tokens=64", "auto or 0"),
        ("graphs.max_tokens=512", "auto or 0"),
        ("model.fp32_logits=true", "false"),
    ],
)
def test_what_depends_on_the_batch_is_refused_where_nothing_may(override: str, uses: str) -> None:
    others = [override, "parallel.tp=2"]
    assert load_config(None, others)
    with pytest.raises(ConfigError, match=f"^{override}: not with model.batch_invariant; use {uses}$"):
        load_config(None, ["model.batch_invariant=true", *others])
