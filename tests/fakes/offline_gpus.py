"""A GPU of any architecture for Triton, on which kernels are compiled and loaded for real but never run.

To be used in a process of its own: Triton has one driver, and its interpreter compiles nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

# Bytes of shared memory that a program can have (CUDA C++ Programming Guide, technical specifications).
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(slots=True, frozen=True)
class LoadedKernel:
    """stack: bytes of a thread, for registers that did not suffice."""

    name: str
    shared: int
    registers: int
    stack: int


class OfflineGpu:
    """Plays Triton's driver. A launch compiles and loads its kernel, as a GPU of this architecture would."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.loaded: list[LoadedKernel] = []
        self.utils = SimpleNamespace(get_device_properties=self._describe, load_binary=self._load)

    def install(self) -> None:
        triton.runtime.driver.set_active(self)

    def get_current_device(self) -> int:
        return self.arch  # kernels are cached by device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:  # noqa: ARG002
        return _run_nothing

    def _describe(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[device]}

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:  # noqa: ARG002
        registers, stack = read_usage(binary)
        self.loaded.append(LoadedKernel(name, shared, registers, stack))
        return 1, 1, registers, stack // 4, 1024


def _run_nothing(*_: object) -> None:
    pass


def read_usage(binary: bytes) -> tuple[int, int]:
    """Reads registers and bytes of stack that each thread of a kernel takes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = _USAGE.search(printed)
    assert found is not None, printed
    return int(found[1]), int(found[2])
