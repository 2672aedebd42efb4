"""A model split over several rank processes: its tokens, its end when one of them dies, and what is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cases.models import make_checkpoint
from tests.drivers.until import wait_until
from tests.processes.greedy_reference import ask_all, check_greedy
from tests.processes.serving import alive, serving

SHAPE: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
GROUPED = ("schedule.group_min_seqs=2", "schedule.group_min_tokens=16")  # two prompts share 200 tokens
LONG = {"model": "demo", "prompt": "Question:", "max_tokens": 1900, "ignore_eos": True}


IN_SHARDS = ("parallel.async_tp_min_tokens=3",)  # steps of prompts, and of several rows


@pytest.mark.parametrize(("tp", "family", "options"), [(2, "qwen3", (*GROUPED, *IN_SHARDS)), (4, "qwen2", ())])
def test_greedy_tokens_equal_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, family: str, options: tuple[str, ...]
) -> None:
    """Two KV heads: of two ranks each has one, of four two each have the same. Nothing stays of where they met."""
    place = Path(tempfile.mkdtemp())  # with a path short enough for sockets
    monkeypatch.setenv("TMPDIR", str(place))
    folder = make_checkpoint(tmp_path / "model", family, seed=5, tie_word_embeddings=tp == 4, **SHAPE)
    options = (f"model.path={folder}", "model.served_name=m", f"parallel.tp={tp}", *options)
    with serving(tmp_path, *options) as server:
        assert {f"rank-0-{rank}" for rank in range(tp)} < set(server.children)
        answers = ask_all(server)
        server.signal_group(signal.SIGTERM)
        assert server.wait() == 0
        assert not alive(server.pids)
    assert not list(place.glob("toka-*"))
    shutil.rmtree(place)
    check_greedy(folder, answers)


@pytest.mark.parametrize("victim", ["rank-0-0", "rank-0-1"])
def test_a_killed_rank_ends_everything_and_clients_hear_why(tmp_path: Path, victim: str) -> None:
    with serving(tmp_path, "parallel.tp=2") as server, ThreadPoolExecutor() as pool:
        whole = pool.submit(server.post, "/v1/completions", **LONG)
        events = server.stream("/v1/completions", **LONG)
        next(events)
        wait_until(lambda: server.metric("requests_held") == 2)
        os.kill(server.children[victim], signal.SIGKILL)
        status, answer = whole.result(timeout=60)
        assert status == 500
        assert f"{victim} was killed by SIGKILL" in answer["error"]["message"]
        *_, last = events
        assert f"{victim} was killed by SIGKILL" in last["error"]["message"]
        assert server.wait() == 1
        assert not alive(server.pids)


def test_a_size_that_cannot_be_is_refused_before_anything_starts() -> None:
    command = [sys.executable, "-m", "toka_async.cli", "serve", "server.port=0", "parallel.tp=4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "parallel.tp=4" in line
    assert line.endswith("use one of 1, 2")
