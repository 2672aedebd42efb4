from __future__ import annotations

import pytest
import torch

from toka_async.transfer.errors import TransferError
from toka_async.transfer.tensors import TensorInfo, read_infos


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
        TensorInfo("a", torch.float32, (2,)).view(torch.zeros(10, dtype=torch.uint8), 4)
