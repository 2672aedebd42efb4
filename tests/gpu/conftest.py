from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

MOST_KEPT = 1 << 30  # bytes


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Engines refer to themselves, and a GPU's memory does not make Python collect them: workers share the GPU."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > MOST_KEPT:
        gc.collect()
        torch.cuda.empty_cache()
