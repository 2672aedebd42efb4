from __future__ import annotations

import pytest
import torch

from toka_async.transfer import checksum
from toka_async.transfer.checksum import sum_part, sum_tensor, sum_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_sums_of_parts_add_up(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(5, 4, 3).to(dtype)
    whole = sum_tensor(tensor)
    monkeypatch.setattr(checksum, "_MOST", 24)  # of which rows are summed two by two
    assert sum_tensor(tensor) == whole
    parts = [sum_part(tensor[:2], tensor.shape, (0, 0, 0)), sum_part(tensor[2:, :1], tensor.shape, (2, 0, 0))]
    parts.append(sum_part(tensor[2:, 1:], tensor.shape, (2, 1, 0)))
    assert f"{sum(parts) % 2**64:016x}" == whole


def test_every_change_changes_the_sum() -> None:
    tensor = torch.randn(8, 4)
    swapped = tensor.clone()
    swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
    changed = tensor.clone()
    changed[3, 2] *= 1.0000002
    assert len({sum_tensor(each) for each in (tensor, swapped, changed, -tensor)}) == 4
    assert sum_tensors({"a": tensor, "b": torch.tensor(1.0)}) == {
        "a": sum_tensor(tensor),
        "b": sum_tensor(torch.tensor(1.0)),
    }
