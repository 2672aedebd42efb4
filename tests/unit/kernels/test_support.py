from __future__ import annotations

import pytest
import torch

from toka_async.kernels import support
from toka_async.kernels.support import explain_no_kernels

CUDA = torch.device("cuda")


@pytest.mark.parametrize(("capability", "runs"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(support, "find_spec", lambda _: object())
    assert (not explain_no_kernels(CUDA)) == runs


def test_a_cpu_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain_no_kernels(torch.device("cpu")) == "expected a CUDA device, got cpu"
    monkeypatch.setattr(support, "find_spec", lambda _: None)
    assert "pip install triton" in explain_no_kernels(CUDA)
