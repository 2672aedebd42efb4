from __future__ import annotations

import os
import subprocess
import sys
from typing import cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from toka_async.kernels.launches.pdl import FEW_ROWS, can_follow


class Rows:
    """What is asked of a tensor."""

    def __init__(self, num_rows: int, index: int) -> None:
        self.shape = num_rows, 8
        self.is_cuda = True
        self.device = torch.device("cuda", index)


@pytest.mark.parametrize(("index", "capability"), [(101, (8, 9)), (102, (9, 0)), (103, (12, 0))])
def test_kernels_of_few_rows_follow_where_the_gpu_can(
    monkeypatch: pytest.MonkeyPatch, index: int, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    supported = capability >= (9, 0)
    follows = [can_follow(cast(Tensor, Rows(num_rows, index))) for num_rows in (1, FEW_ROWS, FEW_ROWS + 1)]
    assert follows == [supported, supported, False]


def test_there_is_nothing_to_follow_on_a_cpu() -> None:
    assert not can_follow(torch.zeros(1, 8))


@pytest.mark.parametrize("tile", [0, 4])  # of one row, and of up to 16
def test_weights_are_fetched_before_and_all_is_read_after_the_wait(tile: int) -> None:
    """The compiler must not move loads in front of it: what they read is written by the kernel before."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.processes.compile_few_rows"]
    new, old = (
        subprocess.run([*command, arch, str(tile)], env=environment, capture_output=True, text=True, check=True).stdout
        for arch in ("90", "80")
    )
    names = ("prefetch.global", "launch_dependents", "griddepcontrol.wait", "ld.global", "cp.async", "st.global")
    seen = [name for line in new.splitlines() for name in names if name in line and "//" not in line.split(name)[0]]
    order = list(dict.fromkeys(seen))
    assert order[:3] == list(names[:3])
    assert seen[seen.index("griddepcontrol.wait") :].count("prefetch.global") == 0
    assert order[-1] == "st.global"
    assert not any(name in old for name in names[:3])
