from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from toka_async.kernels.pdl import FEW_ROWS, can_follow


class Rows:
    """What is asked of a tensor."""

    def __init__(self, num_rows: int, index: int) -> None:
        self.num_rows = num_rows
        self.is_cuda = True
        self.device = torch.device("cuda", index)

    def __len__(self) -> int:
        return self.num_rows


@pytest.mark.parametrize(("index", "capability"), [(101, (8, 9)), (102, (9, 0)), (103, (12, 0))])
def test_kernels_of_few_rows_follow_where_the_gpu_can(
    monkeypatch: pytest.MonkeyPatch, index: int, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    supported = capability >= (9, 0)
    follows = [can_follow(cast(Tensor, Rows(num_rows, index))) for num_rows in (1, FEW_ROWS, FEW_ROWS + 1)]
    assert follows == [supported, supported, False]


def test_there_is_nothing_to_follow_on_a_cpu() -> None:
    assert not can_follow(torch.zeros(1, 8))
