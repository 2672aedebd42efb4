"""Kernels run compiled where there is a GPU, elsewhere in Triton's interpreter (tests/conftest.py)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
