from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cases.models import make_checkpoint
from tests.fakes.graphs import FakeGraphs
from tests.fakes.plain_kernels import PlainEditKernels, PlainKernels
from toka_async.checkpoint.spec import read_spec
from toka_async.config import CacheConfig, Config, ScheduleConfig
from toka_async.runner.mixed import MixedPass
from toka_async.runner.runner import Runner
from toka_async.startup.runner_factory import RunnerFactory

Reference = Callable[[list[int]], Tensor]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("runner"), "llama")


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    """The log-probs that transformers computes: token ids to float64 [t, vocab]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)

    def logprobs(token_ids: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([token_ids])).logits[0]
            return logits.double().log_softmax(-1)

    return logprobs


@pytest.fixture
def runner(model_dir: Path) -> Runner:
    config = Config(cache=CacheConfig(page_size=5, num_tokens=400), schedule=ScheduleConfig(max_seqs=8))
    return RunnerFactory(model_dir, read_spec(model_dir), config).build()


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners that sample by kernels do so on the CPU, without an interpreter."""
    pytest.importorskip("triton")
    from toka_async.runner import kernel_sampler

    monkeypatch.setattr(kernel_sampler, "SamplingKernels", PlainKernels)
    monkeypatch.setattr(kernel_sampler, "EditKernels", PlainEditKernels)


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch, plain_kernels: None) -> FakeGraphs:  # noqa: ARG001
    """Steps of such runners can be captured."""
    from toka_async.runner.decode import DecodePass

    graphs = FakeGraphs(monkeypatch)

    def make_capturable(method: str, name: str) -> None:
        computes = getattr(DecodePass, method)
        monkeypatch.setattr(
            DecodePass, method, lambda self, *args: graphs.capturable(partial(computes, self), name)(*args)
        )

    links = {"_draw": "plain", "_compute_logits": "logits", "_draw_edited": "full", "_keep_hidden": "torch"}
    for method, name in {"_decode": "step", "_draw_full": "full", **links}.items():
        make_capturable(method, name)
    begin = MixedPass._begin
    monkeypatch.setattr(MixedPass, "_begin", lambda self, size: graphs.capturable(partial(begin, self), "mixed")(size))
    return graphs
