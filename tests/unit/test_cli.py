"""The command line: what it prints, its exit codes, and that mistakes are one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toka_async import __version__, cli
from toka_async.config import describe


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


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["config"]])
def test_every_key_is_shown(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    for field in describe():
        assert f"{field.key}={field.default}" in out
        assert field.meaning in out
        assert field.type in out


def test_config_shows_effective_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[server]\nport = 1\nhost = 'there'\n")
    code, out, _ = run(capsys, "config", "server.port=2", "--config", str(path), "cache.page_size=8")
    assert code == 0
    assert "server.port=2 " in out
    assert "server.host=there " in out
    assert "cache.page_size=8 " in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "command"),
        (["srve"], "'srve'"),
        (["serve", "--bogus"], "'--bogus'"),
        (["version", "x"], "'x'"),
        (["serve", "--config"], "--config"),
        (["serve", "--config", "/does/not/exist.toml"], "/does/not/exist.toml"),
        (["serve", "model.pth=x"], "model.path"),
        (["serve", "server.port=x"], "server.port"),
        (["serve", "parallel.tp=4"], "parallel.tp=4: "),
        (["serve", "model.path=/does/not/exist"], "/does/not/exist"),
        (["config", "what"], "'what'"),
        (["ping"], "prompt"),
        (["batch"], "action"),
        (["batch", "run", "-i", "x"], "--output"),
        (["batch", "run", "-i", "/does/not/exist", "-o", "/tmp/out"], "/does/not/exist"),
        (["ping", "x", "server.port=-1"], "server.port"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("toka-async: ")
    assert err.count("\n") == 1
    assert part in err


def test_interrupted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_config", interrupted)
    assert run(capsys, "config") == (130, "", "toka-async: interrupted\n")


def test_markdown_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "config", "--markdown")
    lines = out.splitlines()
    assert len(lines) == 2 + len(describe())
    assert {line.count(" | ") + line.count("|---") for line in lines} == {3, 4}


def test_readme_has_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "config", "--markdown")
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert out.strip() in readme, "paste the output of `toka-async config --markdown` into README.md"


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
