"""A model split over GPUs, a process each: the reference's greedy tokens, and one GPU's sampled ones.

Rows are sampled by the ranks in shares, from captured graphs and without them; steps are computed whole on each rank,
or in shards of tokens that overlap.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases.models import make_checkpoint
from tests.drivers.gpu_models import SHAPES
from tests.processes.greedy_reference import ask_all, check_greedy
from tests.processes.serving import Serving, serving

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


# Few tokens and no locks: tests may share GPUs.
SMALL = ("cache.num_tokens=32768", "schedule.max_seqs=16", "graphs.max_rows=8", "parallel.gpu_locks=")
OPTIONS = ("model.dtype=float32", "tuning.dir=", *SMALL)
SHARDS = "parallel.async_tp_min_tokens=3"  # of more rows than ranks, and of prompts
ALL_WHOLE = "parallel.async_tp_min_tokens=0"
# Filters, penalties, log-probs: everything that kernels sample.
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "logprobs": 3},
    {"temperature": 0.8, "min_tokens": 20, "logit_bias": {"5": 3.0, "17": -2.0}},
)


@pytest.mark.parametrize("options", [(ALL_WHOLE,), (ALL_WHOLE, "graphs.enabled=false"), (SHARDS,)], ids=str)
@pytest.mark.parametrize("tp", [2, 4])
def test_greedy_tokens_equal_the_reference(tmp_path: Path, tp: int, options: tuple[str, ...]) -> None:
    need_gpus(tp)
    folder = make_folder(tmp_path)
    with serving(tmp_path, *served(folder, tp), *options) as server:
        answers = ask_all(server)
        assert server.metric("compiles_total") == 0
        _, metrics = server.get("/metrics")
        least = float(tp + 1) if SHARDS in options else 0.0
        assert f'toka:replica_async_tp_min_tokens{{replica="0"}} {least}' in metrics
        assert "nothing overlaps" not in server.said()
    check_greedy(folder, answers)


@pytest.mark.parametrize("options", [("graphs.enabled=false",), (SHARDS,), ("model.dtype=bfloat16",)], ids=str)
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_on_two_gpus(tmp_path: Path, family: str, ep: int, options: tuple[str, ...]) -> None:
    """Each GPU has a part of every expert, or every second expert whole, whose rows it gets from the other GPU."""
    folder = make_folder(tmp_path, family)
    with serving(tmp_path, *served(folder, 2), f"parallel.ep={ep}", *options) as server:
        answers, again = ask_all(server), ask_all(server)
        assert server.metric("compiles_total") == 0
    if "model.dtype=bfloat16" in options:
        assert [len(ids) for ids in answers] == [len(ids) for ids in again]  # roundings choose other experts
    else:
        check_greedy(folder, answers)


@pytest.mark.parametrize("options", [(ALL_WHOLE,), (ALL_WHOLE, "graphs.enabled=false"), (SHARDS,)], ids=str)
@pytest.mark.parametrize("tp", [2, 4])
def test_sampled_tokens_equal_those_of_one_gpu(tmp_path: Path, tp: int, options: tuple[str, ...]) -> None:
    """With seeds, but for a sample or two: a number may fall between two tokens, as sums differ by rounding."""
    need_gpus(tp)
    folder = make_folder(tmp_path)
    with serving(tmp_path, *served(folder, 1)) as server:
        expected = ask_samples(server)
    with serving(tmp_path, *served(folder, tp), *options) as server:
        samples = ask_samples(server)
    same = [one == other for one, other in zip(samples, expected, strict=True)]
    assert sum(same) >= len(same) - 2, f"{sum(same)} of {len(same)}"


@pytest.mark.parametrize("tp", [2, 4])
def test_the_smallest_overlapping_step_is_measured(tmp_path: Path, tp: int) -> None:
    need_gpus(tp)
    with serving(tmp_path, *served(make_folder(tmp_path), tp), "schedule.max_tokens=4096") as server:
        said = server.said()
        assert "async TP: from" in said or "async TP: never; ms of a layer" in said
        assert ask_all(server)


def need_gpus(number: int) -> None:
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} CUDA devices")


def make_folder(tmp_path: Path, name: str = "llama") -> Path:
    family, shape = SHAPES[name]
    return make_checkpoint(tmp_path / "model", family, seed=2, **shape)


def served(folder: Path, tp: int) -> tuple[str, ...]:
    return (f"model.path={folder}", "model.served_name=m", f"parallel.tp={tp}", *OPTIONS)


def ask_samples(server: Serving) -> list[list[int]]:
    """The tokens of 64 samples, all asked for at once."""

    def ask(request: dict[str, Any]) -> list[list[int]]:
        status, answer = server.post("/v1/completions", model="m", **request)
        assert status == 200, answer
        return [choice["token_ids"] for choice in answer["choices"]]

    common = {"max_tokens": 32, "n": 4, "ignore_eos": True, "return_token_ids": True}
    requests = [
        {**common, **sampling, "prompt": [*range(seed, 7 * seed)], "seed": seed}
        for sampling in SAMPLED
        for seed in (1, 2, 3, 5)
    ]
    with ThreadPoolExecutor(len(requests)) as pool:
        return [ids for answer in pool.map(ask, requests) for ids in answer]


def test_a_killed_rank_leaves_no_process(tmp_path: Path) -> None:
    family, shape = SHAPES["llama"]
    folder = make_checkpoint(tmp_path / "model", family, seed=2, **shape)
    with serving(tmp_path, f"model.path={folder}", "model.served_name=m", "parallel.tp=2", *SMALL) as server:
        events = server.stream("/v1/completions", model="m", prompt="Q", max_tokens=400, ignore_eos=True)
        next(events)
        os.kill(server.children["rank-0-1"], signal.SIGKILL)
        *_, last = events
        assert "rank-0-1 was killed by SIGKILL" in last["error"]["message"]
        assert server.wait_for_all() == 1
