"""Starts that cannot succeed: exit code 2 and one line that says what to mend; stops during the start; `warm`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import toka_async
from tests.drivers.until import SECONDS, wait_until
from tests.processes.serving import alive, list_session, serving, wait_until_gone
from toka_async.bench.loads.served import list_children

DEMO = Path(toka_async.__file__).parent / "demo"


def serve(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toka_async.cli", "serve", "server.port=0", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    # A rank that still starts may have told a stage after the error.
    line = [line for line in done.stderr.splitlines() if " INFO rank-" not in line][-1]
    assert line.startswith("toka-async: ") or " ERROR toka-async: " in line  # the latter: by a child
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in line


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the built-in model, to be spoilt."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def edit_config(model: Path, **fields: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def cut_config(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "qw')


def unknown_family(model: Path) -> None:
    edit_config(model, model_type="mamba")


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def corrupt_generation_config(model: Path) -> None:
    (model / "generation_config.json").write_text("[1")


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (cut_config, ["config.json", "JSON"]),
        (unknown_family, ["config.json", "'mamba'"]),
        (no_config, ["config.json"]),
        (no_tokenizer, ["tokenizer.json", "model.tokenizer"]),
        (corrupt_generation_config, ["generation_config.json", "JSON"]),
    ],
)
def test_bad_files_are_seen_before_anything_starts(
    model: Path, spoil: Callable[[Path], None], parts: list[str]
) -> None:
    spoil(model)
    done = serve(f"model.path={model}")
    assert_refused(done, *parts)
    assert done.stderr.count("\n") == 1


def test_a_port_in_use() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        done = serve(f"server.port={port}")
    assert_refused(done, "server.port", str(port), "in use")
    assert done.stderr.count("\n") == 1


def corrupt_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0"')


def cut_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (corrupt_tokenizer, ["tokenizer.json"]),
        (cut_weights, ["model.safetensors"]),
    ],
)
def test_bad_files_are_reported_by_the_process_that_reads_them(
    model: Path, spoil: Callable[[Path], None], parts: list[str]
) -> None:
    spoil(model)
    assert_refused(serve(f"model.path={model}"), *parts)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["schedule.max_seqs=64", "schedule.max_tokens=63"], "schedule.max_tokens"),
        (["model.max_context=10000000"], "model.max_context"),
        ([f"cache.num_tokens={2**31 - 1}"], "cache.num_tokens"),
        (["parallel.tp=4"], "use one of 1, 2"),
        (["parallel.pp=4"], "parallel.pp=4: the model has 3 layers; use at most 3"),
    ],
)
def test_values_that_do_not_fit_the_model(overrides: list[str], part: str) -> None:
    assert_refused(serve(*overrides), part)


def test_requests_load_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process would load for its first request is loaded by the time that it serves."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with serving(tmp_path, "model.device=cpu") as server:
        # Threads of the server and of the rank prepare for grammars. Python counts the depth of imports over all
        # threads of a process, so the name is indented where another thread imports at that moment.
        wait_until(lambda: len(re.findall(r"\| +llguidance\n", server.said())) == 2, server.said)
        before = server.said()
        assert "import time:" in before
        assert list(server.stream("/v1/completions", prompt="Question", max_tokens=8))
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stop": "no such"}
        assert server.post("/v1/chat/completions", **chat, logprobs=True, top_logprobs=2)[0] == 200
        after = server.said().removeprefix(before)
    assert [line for line in after.splitlines() if "import time:" in line] == []


@pytest.mark.parametrize("num_children", [0, 1, 3])
def test_a_stop_during_the_start(num_children: int) -> None:
    command = [sys.executable, "-m", "toka_async.cli", "serve", "server.port=0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list_children(process.pid)) >= num_children)
    children = list_children(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) in (0, -signal.SIGTERM)
    assert not alive(children.values())


WARM = [sys.executable, "-m", "toka_async.cli", "warm"]
WITHOUT_GPUS = {name: value for name, value in os.environ.items() if name != "FLASHINFER_CUDA_ARCH_LIST"}


def warm(*overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WARM, *overrides], capture_output=True, text=True, timeout=60, check=False, env=WITHOUT_GPUS
    )


@pytest.mark.parametrize("overrides", [["parallel.tp=2"], ["parallel.dp=2"]])
def test_warm_ends_and_leaves_no_process(overrides: list[str], tmp_path: Path) -> None:
    command = [*WARM, "model.device=cpu", "cache.num_tokens=4096", *overrides]
    with (tmp_path / "stderr").open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors, start_new_session=True)
    assert process.wait(60) == 0
    said = (tmp_path / "stderr").read_text()
    assert "ready for later starts: a CPU compiles and measures nothing" in said
    assert "4,096 tokens\n" in said  # one replica is started
    wait_until(lambda: not list_session(process.pid), lambda: f"processes {list_session(process.pid)} are left")


def test_warm_without_a_gpu_says_what_it_could_not_do() -> None:
    done = warm()
    assert (done.returncode, done.stdout) == (0, "")
    assert "there is no GPU here, so nothing is compiled or measured" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=/no/such/folder"], "model.path=/no/such/folder: no such directory"),
        (["model.device=cpu", "attention.backend=flashinfer"], "attention.backend=flashinfer: "),
        (["model.depth=3"], "model.depth"),
    ],
)
def test_warm_reports_a_mistake_in_one_line(overrides: list[str], message: str) -> None:
    done = warm(*overrides)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_warm_that_is_stopped_is_no_success() -> None:
    process = subprocess.Popen([*WARM, "model.device=cpu"], stderr=subprocess.PIPE, start_new_session=True, text=True)
    wait_until(lambda: list_children(process.pid))
    children = list_children(process.pid)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped before it was ready" in said
    wait_until_gone(children.values())


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    """It may be a checkpoint's, with files named like packages."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('the wrong one')")
    command = [sys.executable, "-P", "-m", "toka_async.cli", "serve", "model.device=simulated", "server.port=0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert "serving demo at" in server.stdout.readline()
        server.send_signal(signal.SIGTERM)
        assert server.wait(SECONDS) == 0
