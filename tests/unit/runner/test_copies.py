from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from toka_async.runner.copies import Download, _find_memory, upload

CPU = torch.device("cpu")


@given(
    columns=st.lists(
        st.sampled_from([np.int32, np.int64]).flatmap(lambda dtype: np_st.arrays(dtype, st.integers(0, 5))),
        min_size=1,
        max_size=4,
    )
)
def test_uploaded_columns_keep_their_values(columns: list[np.ndarray]) -> None:
    uploaded = upload(columns, CPU)
    assert {tensor.dtype for tensor in uploaded} == {torch.int64}
    assert [tensor.tolist() for tensor in uploaded] == [column.tolist() for column in columns]


def test_uploaded_columns_are_copies() -> None:
    column = np.arange(3)
    (uploaded,) = upload((column,), CPU)
    column[:] = 9
    assert uploaded.tolist() == [0, 1, 2]


def test_numbers_that_are_not_whole_cannot_be_uploaded() -> None:
    with pytest.raises(TypeError):
        upload((np.ones(2, dtype=np.float32),), CPU)


def test_downloaded_arrays_have_the_shapes_and_types_of_the_tensors() -> None:
    tensors = [
        torch.tensor([[1, -2, 3], [4, 5, 2**31 - 1]], dtype=torch.int32),
        torch.tensor([0.5, torch.nan, -torch.inf]),
        torch.empty((3, 0), dtype=torch.int32),
        torch.arange(6, dtype=torch.float32).view(2, 3).T,  # not contiguous
        torch.tensor(7, dtype=torch.int32),
    ]
    arrays = Download(tensors).collect()
    for array, tensor in zip(arrays, tensors, strict=True):
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array, tensor.numpy())


def test_tensors_can_be_written_again_at_once() -> None:
    for tensors in ([torch.ones(3)], [torch.ones(3), torch.ones(2)]):
        download = Download(tensors)
        for tensor in tensors:
            tensor.zero_()
        assert all((array == 1).all() for array in download.collect())


def test_tensors_of_one_memory_are_copied_as_they_lie() -> None:
    memory = torch.arange(12, dtype=torch.int32)
    views = [memory[7:9], memory[2:6].view(torch.float32).view(2, 2), memory[3:3]]
    found, _ = _find_memory(views)
    assert found.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert found.tolist() == [2, 3, 4, 5, 6, 7, 8]
    download = Download(views)
    expected = [view.clone() for view in views]
    memory.zero_()
    for array, tensor in zip(download.collect(), expected, strict=True):
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array, tensor.numpy())


def test_columns_of_one_memory_are_packed() -> None:
    memory = torch.arange(6, dtype=torch.int32).view(2, 3)
    arrays = Download([memory[:, 1], memory[:, 2]]).collect()
    assert [array.tolist() for array in arrays] == [[1, 4], [2, 5]]


def test_nothing_to_download() -> None:
    assert Download([]).collect() == []
    (array,) = Download([torch.empty(0)]).collect()
    assert array.shape == (0,)
