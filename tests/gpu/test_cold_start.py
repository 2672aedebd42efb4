"""A first start serves before FlashInfer is compiled; after `toka-async warm` a start compiles and measures nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.drivers.engine import Engine
from tests.drivers.gpu_models import make_model
from tests.drivers.until import wait_until
from tests.processes.serving import serving

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NEEDS_FLASHINFER = pytest.mark.skipif(find_spec("flashinfer") is None, reason="no FlashInfer")
BEGINS = "FlashInfer is compiled in the background"
SMALL = (
    "cache.num_tokens=8192",
    "schedule.max_seqs=64",
    "schedule.max_tokens=512",
    "graphs.max_rows=16",
    "parallel.gpu_locks=",  # tests may share GPUs
    "server.port=0",
)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a start with nothing cached."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    model = make_model(tmp_path / "model", "llama")
    return [f"model.path={model}", f"tuning.dir={tmp_path / 'tuning'}", *SMALL]


def compilers(folder: Path) -> list[str]:
    """Id and niceness of the processes that compile FlashInfer's modules in this folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLASHINFER_WORKSPACE_BASE={folder}".encode() in (each / "environ").read_bytes().split(b"\0"):
                command = (each / "cmdline").read_bytes()
                if b"module_compiler" in command or b"ninja" in command or b"cicc" in command:
                    found.append(f"{each.name} {os.getpriority(os.PRIO_PROCESS, int(each.name))}")
        except OSError:
            continue
    return found


@NEEDS_FLASHINFER
def test_a_first_start_serves_while_flashinfer_is_compiled(arguments: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, *arguments) as server:
        wait_until(lambda: BEGINS in server.said())
        wait_until(lambda: any(each.endswith(" 19") for each in compilers(tmp_path)))
        status, _ = server.post("/v1/completions", model=str(tmp_path / "model"), prompt=[1, 2, 3], max_tokens=4)
        assert status == 200
    wait_until(lambda: not compilers(tmp_path), lambda: f"processes {compilers(tmp_path)} are left")


def test_requests_compile_nothing(arguments: list[str], tmp_path: Path) -> None:
    """Of few tokens and many, from graphs and without, with samples that part within a page, sampled in all ways."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.7},
        {"n": 3, "top_p": 0.9},
        {"presence_penalty": 0.5, "logprobs": 5},
        {"repetition_penalty": 1.1, "top_k": 20, "min_tokens": 2, "logit_bias": {"5": 1}},
    ]
    with serving(tmp_path, *arguments, "attention.backend=triton") as server:
        for length in (1, 2, 15, 16, 17, 100, 300):
            for fields in kinds:
                status, answer = server.post("/v1/completions", prompt=[length] * length, max_tokens=5, **fields)
                assert status == 200, answer
        assert server.metric("compiles_total") == 0


def test_kernels_are_compiled_once_while_weights_load(tmp_path: Path) -> None:
    """What was compiled ahead is what runs later: nothing is compiled again, for example for another stride."""
    model = make_model(tmp_path / "model", "qwen3")
    done = subprocess.run(  # where no test has run before
        [sys.executable, "-m", "tests.gpu.test_cold_start", str(model)],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "triton")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    compiled: list[tuple[str, str]] = json.loads(done.stdout)
    ahead = {name for name, thread in compiled if thread == "compiler"}
    later = {name for name, thread in compiled if thread != "compiler"}
    assert ahead >= {
        "pilot",
        "chunk_sums",
        "repair",
        "gather",
        "draw",
        "reject",
        "find_likeliest",
        "edit",
        "restore",
        "measure",
        "renormalize",
    }, done.stdout
    layers = {"_append", "_add_norm", "_gate", "_rotation", "_begin", "_product", "_decode", "_divide"}
    assert ahead >= layers, done.stdout
    assert ahead & {"_prefill", "_prefill_hopper"}
    assert later & ahead <= {"_decode", "_merge"}  # which graphs need in further variants


def list_compiled(model: Path) -> list[tuple[str, str]]:
    """Starts an engine. Returns the kernels that were compiled: each one's name and the kind of thread that did it."""
    from triton import knobs

    compiled: list[tuple[str, str]] = []

    def note(src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append((src.name, threading.current_thread().name.partition("_")[0]))

    knobs.compilation.listener = note
    Engine(model, device="cuda", dtype="bfloat16", backend="triton", max_seqs=64)
    return compiled


@NEEDS_FLASHINFER
@pytest.mark.slow
def test_after_warm_nothing_is_compiled_or_measured(arguments: list[str], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "toka_async.cli", "warm", *arguments], check=True)
    with serving(tmp_path, *arguments) as server:
        found = re.search(r"(\d+) of (\d+) measurements found", server.said())
        assert found is not None
        assert found[1] == found[2]
        assert BEGINS not in server.said()
    asked, _ = json.loads(next((tmp_path / "tuning").glob("attention-*.json")).read_text())
    assert all("flashinfer" in names for names in asked["of"]["parts"])  # measured, whatever was faster


if __name__ == "__main__":
    print(json.dumps(list_compiled(Path(sys.argv[1]))))
