"""Two machines with a GPU each, played by two GPUs of one that reach each other over NCCL's sockets only."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drivers.until import wait_until
from tests.processes.clusters import ClusterServing, starting
from tests.processes.parallel import OPTIONS, REQUESTS, TIE, Reference, ask_all, make_model
from tests.processes.serving import wait_until_gone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
TOKENS = 32
SHAPE: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 256}
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def see_gpu(*numbers: int) -> dict[str, str]:
    return {**SOCKETS, "CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))}


@pytest.mark.parametrize("tp", [1, 2])
def test_greedy_tokens_equal_the_reference_and_a_lost_machine_comes_back(tmp_path: Path, tp: int) -> None:
    if torch.cuda.device_count() < 2 * tp:
        pytest.skip(f"needs {2 * tp} CUDA devices")
    model = make_model(tmp_path / "model", **SHAPE)
    options = (f"model.path={model}", "model.dtype=float32", "parallel.pp=2", f"parallel.tp={tp}", *OPTIONS)
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
        wait_until(lambda: server.get("/health")[0] == 200, cluster.said)
        answers.append(ask_all(server, TOKENS))
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    reference = Reference(model)
    prompts = [prompt for prompt, num_samples in REQUESTS for _ in range(num_samples)]
    for prompt, *tokens in zip(prompts, *answers, strict=True):
        assert max(reference.gap(prompt, ids) for ids in tokens) < TIE
