from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from tests.cases.models import make_checkpoint
from toka_async.attention.build import Backend
from toka_async.attention.kv_cache import E4M3, KVCache
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import ModelSpec, read_spec
from toka_async.startup import compile_ahead as module
from toka_async.startup.compile_ahead import Task, compile_ahead, count_compile_threads, list_compile_tasks

CPU = torch.device("cpu")
LIMITS = RankLimits(max_seqs=8, max_tokens=32, max_context=64)


def test_tasks_run_while_the_body_runs_and_are_waited_for() -> None:
    """Both tasks and the body wait for each other."""
    begun = [threading.Event() for _ in range(3)]
    ended: list[int] = []

    def meet(number: int) -> None:
        begun[number].set()
        assert all(each.wait(60) for each in begun)
        ended.append(number)

    with compile_ahead([partial(meet, 0), partial(meet, 1)], CPU, 2):
        meet(2)
    assert sorted(ended) == [0, 1, 2]


def test_a_failure_is_left_to_the_kernels_use() -> None:
    def fail() -> None:
        raise RuntimeError("out of resources")

    computed: list[str] = []
    with compile_ahead([fail, partial(computed.append, "task")], CPU, 1):
        computed.append("body")
    assert sorted(computed) == ["body", "task"]


def test_an_error_of_the_body_is_raised() -> None:
    with pytest.raises(ValueError, match="no weights"), compile_ahead([], CPU, 1):
        raise ValueError("no weights")


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_spec(make_checkpoint(tmp_path, "mistral", sliding_window=7))


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, on a machine with kernels."""
    pytest.importorskip("triton")
    from toka_async.runner import kernel_sampler
    from toka_async.startup import layer_trials

    names: list[str] = []

    def list_trials(cache: KVCache, num_heads: int, windows: tuple[int, ...], *others: object) -> list[Task]:
        assert (cache.page_size, cache.dtype, cache.keys[0].dtype) == (5, torch.bfloat16, E4M3)
        assert others == (False, 0.0)  # sinks, soft cap
        return [lambda: names.append(f"attention of {num_heads} heads and windows {sorted(set(windows))}")]

    def try_sampling(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        assert (dtype, device) == (torch.bfloat16, CPU)
        names.append(f"sampling of {vocab_size} ids")

    def try_editing(vocab_size: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        assert (page_size, dtype, device) == (5, torch.bfloat16, CPU)
        names.append(f"edits of {vocab_size} ids")

    def list_layers(
        spec: ModelSpec, dtype: torch.dtype, stored: torch.dtype, device: torch.device, page_size: int
    ) -> list[Task]:
        assert (page_size, dtype, stored, device) == (5, torch.bfloat16, E4M3, CPU)
        return [lambda: names.append(f"layers of {spec.hidden_size}")]

    monkeypatch.setattr(module, "has_kernels", lambda _: True)
    monkeypatch.setattr(kernel_sampler, "try_editing", try_editing)
    monkeypatch.setattr(layer_trials, "list_layer_trials", list_layers)
    monkeypatch.setattr(module, "list_triton_trials", list_trials)
    monkeypatch.setattr(kernel_sampler, "try_sampling", try_sampling)
    return names


def tasks_of(spec: ModelSpec, backend: Backend = "auto") -> list[Task]:
    return list_compile_tasks(spec, torch.bfloat16, E4M3, CPU, backend, 5)


def others_of(spec: ModelSpec) -> list[str]:
    """What is compiled besides attention."""
    return [f"{what} of {spec.vocab_size} ids" for what in ("sampling", "edits")] + [f"layers of {spec.hidden_size}"]


def test_all_but_products_is_compiled(spec: ModelSpec, tried: list[str]) -> None:
    for task in tasks_of(spec):
        task()
    windows = sorted(set(spec.windows))
    assert tried == [f"attention of {spec.attention.num_heads} heads and windows {windows}", *others_of(spec)]


@pytest.mark.parametrize(("backend", "head_dim"), [("flashinfer", 64), ("reference", 64), ("auto", 640)])
def test_where_attention_is_not_ours(spec: ModelSpec, tried: list[str], backend: Backend, head_dim: int) -> None:
    attention = msgspec.structs.replace(spec.attention, head_dim=head_dim)
    layers = tuple(msgspec.structs.replace(layer, mixer=attention) for layer in spec.layers)
    for task in tasks_of(msgspec.structs.replace(spec, layers=layers), backend):
        task()
    assert tried == others_of(spec)


@pytest.mark.usefixtures("tried")
def test_a_rank_that_does_not_sample(spec: ModelSpec) -> None:
    assert len(tasks_of(msgspec.structs.replace(spec, vocab_size=0))) == 2


def test_without_kernels_there_is_nothing_to_do(spec: ModelSpec) -> None:
    assert tasks_of(spec) == []


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    assert [count_compile_threads(number) for number in (1, 2, 4, 16, 32)] == [8, 8, 4, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_measurements_and_steps_find_their_kernels_compiled(tmp_path: Path, family: str) -> None:
    """For the same types, alignments and constants as when they run, with biases, too; and none by two tasks."""
    pytest.importorskip("triton")
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = make_checkpoint(tmp_path / "model", family, head_dim=64, vocab_size=1024, num_hidden_layers=2, **sizes)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.processes.compile_ahead", str(model)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path / "triton")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    ahead, later = json.loads(done.stdout)
    assert later == []
    assert len({digest for _, digest in ahead}) == len(ahead)
    of_layers = {"_append", "_add_norm", "_gate", "_rotation", "_begin", "_product", "_gated_product"}
    assert {name for name, _ in ahead} >= of_layers | {"_decode", "_divide", "_prefill_hopper", "draw", "edit"}
