from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from toka_async import __version__, cli
from toka_async.cli import commands
from toka_async.config import ClusterConfig, Config, load_config
from toka_async.config.load import describe
from toka_async.nodes.placing import PORT, NodePlace
from toka_async.procs import node
from toka_async.procs.node import AgentEnd


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = int(str(stop.code))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(capsys, *arguments) == (0, f"toka-async {__version__}\n", "")


@pytest.mark.parametrize("module", ["toka_async", "toka_async.cli"])
def test_python_runs_it_as_a_module(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"toka-async {__version__}\n"


def test_config_shows_effective_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[server]\nport = 1\nhost = 'there'\n")
    code, out, _ = run(capsys, "config", "--unresolved", "server.port=2", "--config", str(path), "cache.page_size=8")
    assert code == 0
    lines = out.splitlines()
    assert {"port = 2", 'host = "there"', "page_size = 8", 'max_seqs = "auto"'} <= set(lines)


def test_what_config_prints_can_be_served(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing is lost on the way, and what was automatic is the same when it is asked for."""
    path = tmp_path / "resolved.toml"
    code, out, _ = run(capsys, "config", "server.port=2", "model.device=cpu", "schedule.max_seqs=17")
    assert code == 0
    path.write_text(out)
    config = load_config(path)
    assert (config.server.port, config.model.device, config.schedule.max_seqs) == (2, "cpu", 17)
    assert (config.model.dtype, config.model.max_context, config.schedule.max_tokens) == ("float32", 2048, 2048)
    assert isinstance(config.cache.num_tokens, int)
    code, again, _ = run(capsys, "config", "--config", str(path))
    assert code == 0
    path.write_text(again)
    assert load_config(path) == config
    assert "# auto" in out
    assert "# auto" not in again


def test_interrupted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "load_config", interrupted)
    assert run(capsys, "config") == (130, "", "toka-async: interrupted\n")


@pytest.mark.parametrize("command", [["ping", "-"], ["chat"]])
def test_what_is_no_text_is_not_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    assert run(capsys, *command) == (2, "", "toka-async: standard input is not text in UTF-8\n")


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:1"), ("0.0.0.0", "http://127.0.0.1:1")])
def test_a_server_at_any_address_is_asked(capsys: pytest.CaptureFixture[str], host: str, url: str) -> None:
    code, out, err = run(capsys, "ping", "x", "--host", host, "--port", "1")
    assert (code, out) == (1, "")
    assert f"no answer from {url}:" in err


def test_markdown_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "config", "--markdown")
    lines = out.splitlines()
    assert len(lines) == 2 + len(describe())
    assert {line.count(" | ") + line.count("|---") for line in lines} == {3, 4}


def test_the_guide_has_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "config", "--markdown")
    guide = (Path(__file__).parents[3] / "configs" / "README.md").read_text(encoding="utf-8")
    assert out.strip() in guide, "paste the output of `toka-async config --markdown` into configs/README.md"


def test_import_loads_nothing_heavy() -> None:
    program = "import sys, toka_async.cli; print(*sorted({'torch', 'zmq', 'aiohttp', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    code, out, err = run(capsys, "keys", "trainer", "--folder", str(folder))
    assert (code, err) == (0, "")
    assert [Path(line).name for line in out.splitlines()] == ["trainer.key", "trainer.key_secret"]
    assert all(Path(line).is_file() for line in out.splitlines())
    code, out, err = run(capsys, "keys", "trainer", "--folder", str(folder))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert run(capsys, "keys", "a/b")[0] == 2


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Configurations that would be served."""
    configs: list[Config] = []

    def run_serve(config: Config) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(commands, "_run_serve", run_serve)
    return configs


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[NodePlace, Config, str, bool]]:
    """Agents that would run."""
    agents: list[tuple[NodePlace, Config, str, bool]] = []

    def run_agent(place: NodePlace, config: Config, interface: str, *, has_settings: bool) -> AgentEnd:
        agents.append((place, config, interface, has_settings))
        return AgentEnd("refused", 2)

    monkeypatch.setattr(node, "run_agent", run_agent)
    return agents


def test_the_first_node_serves(capsys: pytest.CaptureFixture[str], served: list[Config]) -> None:
    where = ["--leader", "tcp://10.0.0.1:5", "--size", "2", "--interface", "eth1"]
    assert run(capsys, "node", *where, "--index", "0", "demo", "parallel.pp=2") == (0, "", "")
    (config,) = served
    assert config.cluster == ClusterConfig(nodes=2, address="tcp://10.0.0.1:5", interface="eth1")
    assert config.parallel.pp == 2


def test_a_group_of_one_serves_on_one_machine(
    capsys: pytest.CaptureFixture[str], served: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LWS_LEADER_ADDRESS": "a", "LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert run(capsys, "node")[0] == 0
    assert served == [Config()]


@pytest.mark.parametrize(
    ("options", "has_settings"),
    [((), False), (("cluster.join_timeout=7",), False), (("parallel.pp=4", "cluster.join_timeout=7"), True)],
)
def test_other_nodes_join(
    capsys: pytest.CaptureFixture[str],
    joined: list[tuple[NodePlace, Config, str, bool]],
    options: tuple[str, ...],
    has_settings: bool,
) -> None:
    where = ["--leader", "10.0.0.1", "--size", "2", "--index", "1"]
    assert run(capsys, "node", *where, *options) == (2, "", "toka-async: refused\n")
    ((place, config, interface, given),) = joined
    assert (place, interface, given) == (NodePlace("10.0.0.1", PORT, 1, 2), "", has_settings)
    assert config.cluster.join_timeout == (7 if options else 300)


def test_a_node_that_does_not_know_its_place_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "node", "--leader", "a", "--size", "2")
    assert (code, err) == (2, "toka-async: --index is missing; LWS_WORKER_INDEX, SLURM_NODEID are not set either\n")
