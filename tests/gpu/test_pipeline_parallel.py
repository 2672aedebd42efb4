"""A model in stages on GPUs, a process each: the reference's greedy tokens, from captured graphs and without them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes.parallel import OPTIONS, REQUESTS, TIE, Reference, ask_all, make_model
from tests.processes.serving import serving

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
TOKENS = 32
SHAPE: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 256}


@pytest.mark.parametrize("options", [(), ("graphs.enabled=false",)])
@pytest.mark.parametrize(("dp", "pp", "tp"), [(1, 2, 1), (1, 4, 1), (1, 2, 2), (2, 2, 1)])
def test_greedy_tokens_equal_the_reference(tmp_path: Path, dp: int, pp: int, tp: int, options: tuple[str, ...]) -> None:
    if torch.cuda.device_count() < dp * pp * tp:
        pytest.skip(f"needs {dp * pp * tp} CUDA devices")
    model = make_model(tmp_path / "model", **SHAPE)
    sizes = (f"parallel.dp={dp}", f"parallel.pp={pp}", f"parallel.tp={tp}")
    with serving(tmp_path, f"model.path={model}", "model.dtype=float32", *OPTIONS, *sizes, *options) as server:
        answers = ask_all(server, TOKENS)
        again = ask_all(server, TOKENS)
        assert server.metric("compiles_total") == 0
    reference = Reference(model)
    prompts = [prompt for prompt, num_samples in REQUESTS for _ in range(num_samples)]
    for prompt, *tokens in zip(prompts, answers, again, strict=True):
        assert max(reference.gap(prompt, ids) for ids in tokens) < TIE


@pytest.mark.parametrize("victim", ["rank-0-0", "rank-0-1"])
def test_a_killed_rank_leaves_no_process(tmp_path: Path, victim: str) -> None:
    model = make_model(tmp_path / "model", **SHAPE)
    with serving(tmp_path, f"model.path={model}", *OPTIONS, "parallel.pp=2") as server:
        events = server.stream("/v1/completions", model="m", prompt="Q", max_tokens=1900, ignore_eos=True)
        next(events)
        os.kill(server.children[victim], signal.SIGKILL)
        *_, last = events
        assert f"{victim} was killed by SIGKILL" in last["error"]["message"]
        assert server.wait_for_all() == 1
