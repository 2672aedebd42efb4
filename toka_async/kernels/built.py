"""Finds out which kernels can be built and loaded on a device, before steps depend on them.

Triton says so at a kernel's first launch: by its own errors (too much shared memory, what its language or ptxas does
not take), or by a RuntimeError out of a compiler pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
from triton.errors import TritonError

C = TypeVar("C")


class UnbuiltError(Exception):
    """No configuration of a kernel can be built; says why the last cannot."""


def explain_unbuilt(launch: Callable[[], object]) -> str:
    """Calls `launch`, which launches kernels. Returns why one of them cannot be built or loaded; empty if all can.

    Other errors of the device are raised: they say nothing about a kernel.
    """
    try:
        launch()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (TritonError, RuntimeError) as error:
        # The text of a CompilationError begins with the place in the source.
        reason = str(getattr(error, "error_message", None) or error).strip()
        return reason.partition("\n")[0] or type(error).__name__
    return ""


def find_built(configs: Iterable[C], launch: Callable[[C], object]) -> C:
    """Finds the first configuration with which `launch` can launch its kernels. Raises UnbuiltError."""
    reason = ""
    for config in configs:
        reason = explain_unbuilt(partial(launch, config))
        if not reason:
            return config
    raise UnbuiltError(reason)
