"""`toka-async warm` as an image's build runs it: it starts ranks, ends by itself, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.until import wait_until
from tests.processes.serving import wait_until_gone
from toka_async.bench.loads.served import list_children

COMMAND = [sys.executable, "-m", "toka_async.cli", "warm"]
WITHOUT = {name: value for name, value in os.environ.items() if name != "FLASHINFER_CUDA_ARCH_LIST"}


def warm(*overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *overrides], capture_output=True, text=True, timeout=60, check=False, env=WITHOUT)


def left(group: int) -> list[int]:
    """The processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("overrides", [[], ["parallel.tp=2"], ["parallel.dp=2"]])
def test_it_ends_and_leaves_no_process(overrides: list[str], tmp_path: Path) -> None:
    command = [*COMMAND, "model.device=cpu", "cache.num_tokens=4096", *overrides]
    with (tmp_path / "stderr").open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors, start_new_session=True)
    assert process.wait(60) == 0
    said = (tmp_path / "stderr").read_text()
    assert "ready for later starts: a CPU compiles and measures nothing" in said
    assert "4,096 tokens" in said
    wait_until(lambda: not left(process.pid), lambda: f"processes {left(process.pid)} are left")


def test_without_a_gpu_it_says_what_it_could_not_do() -> None:
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
def test_a_mistake_is_one_line(overrides: list[str], message: str) -> None:
    done = warm(*overrides)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_stop_is_no_success() -> None:
    process = subprocess.Popen(
        [*COMMAND, "model.device=cpu"], stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    wait_until(lambda: list_children(process.pid))
    children = list_children(process.pid)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped before it was ready" in said
    wait_until_gone(children.values())
