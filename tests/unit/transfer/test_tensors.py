from __future__ import annotations

import pytest
import torch

from toka_async.transfer.errors import TransferError
from toka_async.transfer.tensors import TensorBuffer, TensorInfo, read_infos


def test_columns_are_read() -> None:
    (info,) = read_infos(["a"], ["torch.bfloat16"], [[2, 3]])
    assert info == TensorInfo("a", torch.bfloat16, (2, 3))
    assert info.num_bytes == 12


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((["a"], ["int64"], [[1]]), "a: dtype 'int64' is not known; known: float64"),
        ((["a"], ["float32"], [[-1]]), r"a: shape \[-1\]"),
        ((["a", "b"], ["float32"], [[1]]), "2 names, 1 dtypes and 1 shapes"),
    ],
)
def test_what_cannot_be_read_is_named(columns: tuple[list[str], list[str], list[list[int]]], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        read_infos(*columns)


def test_a_tensor_that_is_not_all_in_the_buffer_is_refused() -> None:
    with pytest.raises(TransferError, match="a: 8 bytes from 4 on are not in 10 bytes"):
        TensorBuffer(torch.zeros(10, dtype=torch.uint8)).view(TensorInfo("a", torch.float32, (2,)), 4)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3), (0, 2)])
@pytest.mark.parametrize("offset", [0, 8, 3])
def test_a_view_has_the_tensor(shape: tuple[int, ...], offset: int) -> None:
    values = torch.arange(6, dtype=torch.float32)
    data = torch.zeros(64, dtype=torch.uint8)
    data[offset : offset + 24] = values.view(torch.uint8)
    found = TensorBuffer(data).view(info := TensorInfo("a", torch.float32, shape), offset)
    assert found.is_contiguous()
    assert torch.equal(found, values[: info.num_bytes // 4].view(shape))
    shares = found.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
    assert shares == (offset % 4 == 0)
