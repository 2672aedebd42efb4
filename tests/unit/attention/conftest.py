"""One thread: tiny models are faster so. Kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.triton_interpreter import interpret_kernels

interpret_kernels()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
