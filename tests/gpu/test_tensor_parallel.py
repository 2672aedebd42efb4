"""A model split over GPUs, a process each: the reference's greedy tokens, from captured graphs and without them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.gpu_models import SHAPES
from tests.greedy_reference import ask_all, check_greedy
from tests.models import make_checkpoint
from tests.serving import serving, wait_until_gone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("graphs", ["true", "false"])
@pytest.mark.parametrize("tp", [2, 4])
def test_greedy_tokens_equal_the_reference(tmp_path: Path, tp: int, graphs: str) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} CUDA devices")
    family, shape = SHAPES["llama"]
    folder = make_checkpoint(tmp_path / "model", family, seed=2, **shape)
    options = ("model.dtype=float32", "schedule.max_seqs=16", "compile.max_graph_seqs=8", f"compile.graphs={graphs}")
    with serving(tmp_path, f"model.path={folder}", "model.served_name=m", f"parallel.tp={tp}", *options) as server:
        answers = ask_all(server)
    check_greedy(folder, answers)


def test_a_killed_rank_leaves_no_process(tmp_path: Path) -> None:
    family, shape = SHAPES["llama"]
    folder = make_checkpoint(tmp_path / "model", family, seed=2, **shape)
    options = ("schedule.max_seqs=16", "compile.max_graph_seqs=8", "parallel.tp=2")
    with serving(tmp_path, f"model.path={folder}", "model.served_name=m", *options) as server:
        events = server.stream("/v1/completions", model="m", prompt="Q", max_tokens=400, ignore_eos=True)
        next(events)
        os.kill(server.children["rank-0-1"], signal.SIGKILL)
        *_, last = events
        assert "rank-0-1 was killed by SIGKILL" in last["error"]["message"]
        assert server.wait() == 1
        wait_until_gone(server.pids, 0)
