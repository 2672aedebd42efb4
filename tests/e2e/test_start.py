"""Starts that cannot succeed: exit code 2 and one line that says what to mend; and stops during the start."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import toka_async
from tests.drivers.until import SECONDS, wait_until
from tests.processes.serving import alive
from toka_async.bench.loads.served import list_children

DEMO = Path(toka_async.__file__).parent / "demo"


def serve(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toka_async.cli", "serve", "server.port=0", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    line = done.stderr.splitlines()[-1]
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


def misshapen_tensor(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, model / "model.safetensors")


def missing_tensor(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def cut_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (corrupt_tokenizer, ["tokenizer.json"]),
        (misshapen_tensor, ["model.norm.weight"]),
        (missing_tensor, ["model.norm.weight"]),
        (no_weights, ["safetensors"]),
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


@pytest.mark.parametrize("num_children", [0, 1, 3])
def test_a_stop_during_the_start(num_children: int) -> None:
    command = [sys.executable, "-m", "toka_async.cli", "serve", "server.port=0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list_children(process.pid)) >= num_children)
    children = list_children(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) in (0, -signal.SIGTERM)
    assert not alive(children.values())
