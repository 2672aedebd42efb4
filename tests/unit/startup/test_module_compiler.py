"""The process that compiles FlashInfer's modules: what it is told, what it tells, and that it ends with its starter."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.until import wait_until
from tests.processes.module_compiler import REQUEST, command
from tests.processes.serving import wait_until_gone
from toka_async.startup.module_compiler import (
    LOWEST_PRIORITY,
    CompilerJob,
    ModuleCompilation,
    compile_in_background,
)


def test_it_does_the_job_and_tells_how_far_it_is(tmp_path: Path) -> None:
    shown: list[tuple[int, int, str]] = []
    compilation = ModuleCompilation(CompilerJob(REQUEST, 5, 3), command("work", str(tmp_path)))
    compilation.wait(lambda *progress: shown.append(progress))
    assert shown == [(done, 3, "files compiled") for done in range(3)]
    assert (tmp_path / "told").read_text() == f"9.0a 5 {min(os.nice(0) + 3, 19)}"


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("fail", "^a.cu: error: too new$"), ("crash", "^the compiling process ended with exit code 7")],
)
def test_a_failure_has_a_reason(mode: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        ModuleCompilation(CompilerJob(REQUEST, 1), command(mode)).wait()


def test_in_the_background_it_is_nice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        compile_in_background(REQUEST, command("work", str(tmp_path))).join()
    assert (tmp_path / "told").read_text() == f"9.0a 1 {LOWEST_PRIORITY}"
    assert caplog.messages == [
        "FlashInfer is compiled in the background, for some minutes; until then our own kernels serve",
        "FlashInfer is compiled: the next start measures where it is faster",
    ]


@pytest.mark.parametrize(
    ("words", "reason"), [(command("fail"), "a.cu: error: too new"), (["/no/such/program"], "No such file")]
)
def test_a_failure_in_the_background_is_one_warning(
    words: list[str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    compile_in_background(REQUEST, words).join()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("FlashInfer could not be compiled, so it is not used: ")
    assert reason in warning


def test_it_and_its_compilers_end_with_the_starter(tmp_path: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-m", "tests.processes.module_compiler", "start", str(tmp_path)])
    try:
        wait_until((tmp_path / "pids").exists)
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    wait_until_gone(pids)
