from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from toka_async.transformers.masks import measure_window


@pytest.mark.parametrize("window", [1, 2, 7, 512, 4096, 131072])
def test_a_window_is_found(window: int) -> None:
    assert measure_window(sliding_window_causal_mask_function(window)) == window


def test_a_causal_mask_has_no_window() -> None:
    assert measure_window(causal_mask_function) == 0


def chunk(size: int, *indices: Any) -> Any:
    return chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))(*indices)


@pytest.mark.parametrize("mask", [bidirectional_mask_function, partial(chunk, 8), partial(chunk, 8192)])
def test_other_masks_are_none(mask: Any) -> None:
    assert measure_window(mask) is None
