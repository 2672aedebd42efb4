"""How much memory a rank may use: of the machine or container, or of a GPU.

Knows no models; the callers turn bytes into pages.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CGROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that processes can still take without swapping, within the container's limit if there is one."""
    available = _of_machine(proc / "meminfo")
    for limit, usage in _CGROUPS:
        numbers = [_number(cgroups / name) for name in (limit, usage)]
        if numbers[0] is not None and numbers[1] is not None:
            available = min(available, numbers[0] - numbers[1])
    return max(available, 0)


def free_cuda_memory(device: torch.device, fraction: float) -> int:
    """Bytes still free of `fraction` of the GPU's memory; what other processes use counts as used."""
    free, total = torch.cuda.mem_get_info(device)
    return int(fraction * total) - (total - free)


def _of_machine(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _number(path: Path) -> int | None:
    """The number in a file; None when there is no such file, or it says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
