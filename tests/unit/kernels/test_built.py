from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from toka_async.kernels.built import UnbuiltError, explain_unbuilt, find_built


def raise_(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutOfResources(106_496, 101_376, "shared memory"), "out of resource: shared memory, Required: 106496"),
        (CompilationError(None, None, "no such type\nand more"), "no such type"),
        (PTXASError("`ptxas` failed with error code 255\nlog"), "`ptxas` failed with error code 255"),
        (RuntimeError("PassManager::run failed"), "PassManager::run failed"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_why_a_kernel_cannot_be_built(error: Exception, reason: str) -> None:
    explained = explain_unbuilt(lambda: raise_(error))
    assert explained.startswith(reason)
    assert "\n" not in explained


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), torch.AcceleratorError(), AssertionError()])
def test_other_failures_are_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        explain_unbuilt(lambda: raise_(error))


def test_the_first_that_can_be_built() -> None:
    tried: list[int] = []

    def launch(size: int) -> None:
        tried.append(size)
        if size > 2:
            raise OutOfResources(size, 2, "shared memory")

    assert find_built([4, 3, 2, 1], launch) == 2
    assert tried == [4, 3, 2]
    with pytest.raises(UnbuiltError, match="Required: 3"):
        find_built([4, 3], launch)
