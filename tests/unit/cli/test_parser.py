from __future__ import annotations

import pytest

from tests.unit.cli.test_commands import run
from toka_async.config.load import describe


def test_what_is_missing_is_named_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "ping") == (
        2,
        "",
        "toka-async: the following arguments are required: prompt (see toka-async ping --help)\n",
    )


COMMANDS = ["", "serve", "ping", "chat", "batch", "batch run", "plan", "keys", "bench", "version"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = run(capsys, *command.split(), "--help")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= 80


def test_every_key_is_in_the_help_of_config(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "config", "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    for field in describe():
        assert f"{field.key}={field.default}" in out
        assert " ".join(f"{field.meaning} [{field.type}]".split()) in words


def test_without_a_command_the_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert all(f"    {name} " in err for name in ("serve", "ping", "chat", "batch", "plan", "config", "keys", "bench"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["srve"], "'srve'; did you mean serve?"),
        (["bench", "polcy"], "'polcy'; did you mean policy?"),
        (["batch", "work"], "'work'; expected run"),
        (["plan", "--gpu-memory", "much"], "'much' is not a number above 0"),
        (["serve", "--bogus"], "'--bogus'"),
        (["version", "x"], "'x'"),
        (["serve", "--config"], "--config"),
        (["serve", "--config", "/does/not/exist.toml"], "/does/not/exist.toml"),
        (["serve", "model.pth=x"], "model.path"),
        (["serve", "server.port=x"], "server.port"),
        (["serve", "parallel.tp=4"], "parallel.tp=4: "),
        (["serve", "model.path=/does/not/exist"], "/does/not/exist"),
        (["config", "./what"], "./what"),
        (["config", "server.port"], "server.port=VALUE"),
        (["serve", "a", "b"], "'b'"),
        (["ping", "x", "y"], "'y'"),
        (["serve", "--port"], "--port"),
        (["serve", "--seed", "0"], "`seed`"),
        (["serve", "--quantization", "awq"], "model.quantize"),
        (["serve", "torch_compile=T"], "torch_compile"),
        (["serve", "--model.pth", "x"], "model.path"),
        (["ping", "x", "-n", "0"], "'0'"),
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
