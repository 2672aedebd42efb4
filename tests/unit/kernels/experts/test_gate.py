from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from toka_async.kernels.experts import gate as module
from toka_async.kernels.experts.gate import open_gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden", "block"), [(1, 24, 2048), (5, 33, 2048), (5, 40, 16)])
def test_it_is_the_sigmoid_of_products(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    num_tokens: int,
    hidden: int,
    block: int,
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    monkeypatch.setattr(module, "_CELLS", 2 * block)
    x, gate = (torch.randn(rows, hidden).to(device, dtype) for rows in (num_tokens, 1))
    exact = torch.sigmoid(x.double() @ gate.double().T)[:, 0]
    torch.testing.assert_close(open_gate(x, gate).double(), exact, atol=1e-5, rtol=1e-5)
