"""`toka-async bench control-plane` at a small size: real processes, every answer checked, one line of JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.serving import serving

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


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    with serving(tmp_path, "model.device=simulated", "simulated.step_ms=50") as server:
        command = [sys.executable, "-m", "toka_async.cli", "bench", "serve-load", "--url", server.url]
        sizes = ["--prompts", "2", "--samples", "4", "--output-tokens", "400", "--shots", "1"]
        with subprocess.Popen([*command, *sizes], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert "0/2 requests, 0/3,200 tokens" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "0 of 2 requests had ended" in out


def test_stop_strings_and_log_probs() -> None:
    done = bench("--json", "--stop", "on", "--logprobs", "0")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["stop"], result["logprobs"]) == (["on"], 0)
    assert result["bytes_per_token"] > 30  # each token has a name twice, a log-prob twice and an offset


def test_a_wrong_override() -> None:
    done = bench("schedule.max_seq=8")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean schedule.max_seqs?" in done.stderr.splitlines()[-1]


def test_steps_of_the_built_in_model() -> None:
    command = [sys.executable, "-m", "toka_async.cli", "bench", "step", "--json", "--steps", "2", "model.device=cpu"]
    sizes = ["--rows", "1,4,9", "--context", "40", "--shared-prefix", "0,32", "--groups", "2", "--prompt", "20"]
    limits = [
        "schedule.max_seqs=8",
        "cache.num_tokens=4096",
        "schedule.group_min_seqs=2",
        "schedule.group_min_tokens=1",
    ]
    done = subprocess.run([*command, *sizes, *limits], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(each["rows"], each["prefix"], each["groups"], each["prompt"]) for each in result["steps"]] == [
        (1, 0, 0, 0),
        (4, 0, 0, 0),
        (1, 32, 0, 0),
        (4, 32, 2, 0),
        (0, 0, 0, 20),
    ]
    for each in result["steps"]:
        assert each["ms"] > 0
        parts = [each[f"{part}_ms"] for part in ("matrices", "attention", "sampling")]
        assert each["floor_ms"] == pytest.approx(sum(parts), abs=2e-4)
        assert each["torch_ms"] > each["attention_ms"] + each["sampling_ms"]
        assert each["tokens_per_second"] == pytest.approx((each["rows"] or 20) / each["ms"] * 1000, rel=0.01)
    assert result["skipped"] == [
        f"9 rows, context 40{shared}: schedule.max_seqs is 8" for shared in ("", ", 32 shared")
    ]
    assert result["cache_tokens"] == 4096
