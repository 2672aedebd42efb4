"""`toka-async bench control-plane` at a small size: real processes, every answer checked, one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SMALL = ["--sequences", "64", "--samples", "16", "--prompt-tokens", "50", "--output-tokens", "24", "--end-rate", "0.02"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toka_async.cli", "bench", "control-plane", *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("stream", [False, True])
def test_one_line_of_json(stream: bool) -> None:
    done = bench("--json", *(["--stream"] if stream else []))
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["tokens_per_second"] > 0
    assert 0 < result["scheduler_us_per_step"]["p50"] <= result["scheduler_us_per_step"]["p99"]
    assert result["server_us_per_1000_tokens"] >= 0
    assert result["bytes_per_token"] > 1
    assert (result["connections"], result["waves"], result["stream"]) == (4, 2, stream)
    assert 128 < result["tokens"] <= 128 * 24
    assert 0 < result["stopped"] < 128
    assert result["steps"] >= 48
    assert set(result["cpu_seconds"]) == {"server", "scheduler-0", "rank-0-0", "client"}


def test_a_wrong_override() -> None:
    done = bench("schedule.max_seq=8")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean schedule.max_seqs?" in done.stderr.splitlines()[-1]
