"""Two machines with a GPU each, played by two GPUs of one that reach each other over NCCL's sockets only.

Needs two GPUs and the loopback interface; no other network, and no namespaces. The first two tests take about two
minutes together where nothing is compiled yet.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases.models import make_checkpoint
from tests.drivers.until import wait_until
from tests.processes.clusters import ClusterServing, starting
from tests.processes.parallel import OPTIONS, Reference, ask_all, check_tokens, make_model
from tests.processes.serving import Serving, serving, wait_until_gone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
TOKENS = 32
START = 150.0  # seconds at most, where kernels must be compiled
SMALL_SHAPE: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 256}
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
_LLAMA: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
LLAMAS: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
}
MAX_SEQS = {"1B": 8192, "8B": 4096}
PROMPTS = 16


def see_gpu(*numbers: int) -> dict[str, str]:
    return {**SOCKETS, "CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))}


@pytest.mark.parametrize("tp", [1, 2])
def test_greedy_tokens_equal_those_of_one_machine_and_a_lost_machine_comes_back(tmp_path: Path, tp: int) -> None:
    if torch.cuda.device_count() < 2 * tp:
        pytest.skip(f"needs {2 * tp} CUDA devices")
    model = make_model(tmp_path / "model", **SMALL_SHAPE)
    options = (f"model.path={model}", "model.dtype=float32", "parallel.pp=2", f"parallel.tp={tp}", *OPTIONS)
    with serving(tmp_path, *options) as local:
        expected = ask_all(local, TOKENS)
    with starting(tmp_path, 2, *options, environment=see_gpu(*range(tp))) as cluster:
        agent = cluster.join(1, environment=see_gpu(*range(tp, 2 * tp)))
        server = ClusterServing(cluster)
        answers = [ask_all(server, TOKENS), ask_all(server, TOKENS)]
        assert server.metric("compiles_total") == 0
        ranks = [*cluster.ranks_of(1).values(), *(pid for name, pid in server.children.items() if "rank" in name)]
        agent.kill()
        agent.wait()
        wait_until_gone(ranks)
        cluster.join(1, environment=see_gpu(*range(tp, 2 * tp)))
        wait_until(lambda: server.get("/health")[0] == 200, cluster.said, START)
        answers.append(ask_all(server, TOKENS))
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    reference = Reference(model)
    for tokens in [expected, *answers]:
        check_tokens(reference, expected, tokens, TOKENS)


@pytest.mark.parametrize("size", ["1B", pytest.param("8B", marks=pytest.mark.slow)])
def test_throughput_of_two_machines_beside_one(tmp_path: Path, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints tokens/s of a model with random weights in two stages; asserts only that every sample ends."""
    model = make_shape(tmp_path / "model", _LLAMA | LLAMAS[size])
    options = (
        f"model.path={model}",
        "model.load=random",
        "parallel.pp=2",
        "cache.num_tokens=auto",
        f"schedule.max_seqs={MAX_SEQS[size]}",
        f"schedule.max_tokens={4 * MAX_SEQS[size]}",
        f"tuning.dir={tmp_path / 'tuning'}",
        "log.stats_interval=0",
    )
    with serving(tmp_path, *options) as local:
        figures = {"one machine, stages over NVLink": measure(local, MAX_SEQS[size])}
    with starting(tmp_path, 2, *options, environment=see_gpu(0)) as cluster:
        cluster.join(1, environment=see_gpu(1))
        server = ClusterServing(cluster)
        figures["two agents, stages over NCCL's sockets on loopback"] = measure(server, MAX_SEQS[size])
    with capsys.disabled():
        for name, result in figures.items():
            print(f"\n{size}, parallel.pp=2, {name}: {result['tokens_per_second']:,.0f} tokens/s", end="")
        print()
    assert all(result["errors"] == 0 for result in figures.values())


def make_shape(folder: Path, shape: dict[str, Any]) -> Path:
    """A model's folder without weights."""
    make_checkpoint(folder, "llama")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | shape))
    return folder


def measure(server: Serving, num_sequences: int) -> Any:
    """What serve-load finds with samples of 192 tokens."""
    load = ("--url", server.url, "--prompts", str(PROMPTS), "--samples", str(num_sequences // PROMPTS), "--warm")
    command = [sys.executable, "-m", "toka_async.cli", "bench", "serve-load", *load, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
