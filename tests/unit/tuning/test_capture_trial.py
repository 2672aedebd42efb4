"""What a failed capture means; captures themselves need a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.foreign_models import make_foreign
from toka_async.model.comm import LocalComm
from toka_async.model.matrices.ops import TorchOps
from toka_async.model.weights import load_weights
from toka_async.transformers.build import build_foreign
from toka_async.transformers.describe import describe
from toka_async.tuning.capture_trial import can_be_captured

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and graphs that do nothing."""
    stream = SimpleNamespace(wait_stream=lambda _other: None)
    for name, value in {
        "Stream": lambda _device: stream,
        "current_stream": lambda _device: stream,
        "stream": lambda _stream: nullcontext(),
        "synchronize": lambda _device: None,
        "graph": lambda _graph, stream: nullcontext(stream),
        "CUDAGraph": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


def test_a_models_code_is_run_before_it_is_captured(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path, "starcoder2")
    spec = describe(folder, trust_remote_code=False)
    model = build_foreign(folder, False, spec, torch.float32, CPU, LocalComm(), TorchOps())
    load_weights(model, folder)
    assert can_be_captured(model, spec.attention.num_heads, 0, torch.float32, CPU)


def test_code_that_waits_for_the_device_cannot_be_captured() -> None:
    calls: list[Tensor] = []

    def forward(inputs: Tensor, *_: object) -> Tensor:
        calls.append(inputs)
        if len(calls) > 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return inputs

    model: Any = SimpleNamespace(forward=forward)
    assert not can_be_captured(model, 4, 16, torch.float32, CPU)
    assert [tuple(inputs.shape) for inputs in calls] == [(2, 16)] * 2
