"""Kernels run compiled where there is a GPU, elsewhere in Triton's interpreter: chosen before its first import."""

from __future__ import annotations

import pytest
import torch

from tests.triton_interpreter import interpret_kernels

interpret_kernels()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
