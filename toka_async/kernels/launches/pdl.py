"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for it inside.

What a kernel does before `follow` may only concern what no kernel in front of it writes. On GPUs from compute
capability 9.0 on; elsewhere kernels run one after the other as usual.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

FEW_ROWS = 16  # of a step that is so short that the time between its kernels counts


def can_follow(x: Tensor) -> bool:
    """Tells whether a kernel over these rows should start before the one in front of it has ended."""
    return x.is_cuda and x.shape[0] <= FEW_ROWS and _is_supported(x.device)


def list_row_counts(device: torch.device) -> list[int]:
    """Lists numbers of rows that take every variant of a kernel: one that starts early, where there is one, or not."""
    starts_early = device.type == "cuda" and _is_supported(device)
    return [FEW_ROWS, FEW_ROWS + 1] if starts_early else [FEW_ROWS + 1]


@cache
def _is_supported(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def follow(pdl: tl.constexpr):
    """Lets the next kernel start, and waits until the ones before have ended and their writes can be read."""
    if pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
