"""Counts the programs of a compiled kernel that a GPU runs at once, from what each takes of a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_WARP = 32  # threads
_REGISTERS = 65_536  # of a multiprocessor since compute capability 5.0
_REGISTER_UNIT = 256  # registers are given to warps in such units
_PARTITIONS = 4  # parts of a multiprocessor, each of which has a quarter of the registers
_SHARED_UNIT = 128  # bytes
_RESERVED = 1024  # bytes of shared memory that each program takes besides its own
_FEW_PROGRAMS = {(8, 6): 16, (8, 7): 16}  # compute capabilities with fewer programs than warps admit


@dataclass(slots=True, frozen=True)
class ProcessorLimits:
    """What a multiprocessor has. shared: bytes of shared memory. registers: of 32 bits."""

    shared: int
    warps: int
    programs: int
    registers: int = _REGISTERS


def programs_per_sm(shared: int, registers: int, warps: int, limits: ProcessorLimits) -> int:
    """Counts the programs that fit a multiprocessor at once, at least 1.

    shared: bytes of a program. registers: of a thread. warps: of a program. The rules are those of CUDA's occupancy
    calculator for compute capability 8.0 and later.
    """
    each = -(-(shared + _RESERVED) // _SHARED_UNIT) * _SHARED_UNIT
    of_warp = max(1, -(-registers * _WARP // _REGISTER_UNIT)) * _REGISTER_UNIT
    most_warps = limits.registers // of_warp // _PARTITIONS * _PARTITIONS
    return max(1, min(limits.shared // each, most_warps // warps, limits.warps // warps, limits.programs))


def read_limits(device: torch.device) -> ProcessorLimits:
    """Reads the limits of a CUDA device."""
    found = torch.cuda.get_device_properties(device)
    warps = found.max_threads_per_multi_processor // _WARP
    return ProcessorLimits(
        shared=found.shared_memory_per_multiprocessor,
        warps=warps,
        programs=_FEW_PROGRAMS.get((found.major, found.minor), warps // 2),
    )


def count_resident(kernel: Any, device: torch.device) -> int:
    """Counts the programs of a kernel, as a launch returns it, that run at once on a CUDA device."""
    metadata = kernel.metadata
    each = programs_per_sm(metadata.shared, kernel.n_regs, metadata.num_warps, read_limits(device))
    return each * torch.cuda.get_device_properties(device).multi_processor_count
