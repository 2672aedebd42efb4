"""Reads how much memory a rank may use: of the machine, of the container, or of a GPU."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

_AUTO_CPU_SHARE = 0.25  # of the available memory, by default
_MOST_CPU_SHARE = 0.9  # of the available memory, if configured
_CGROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def read_available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Reads the bytes that this process can take without swapping, within its container's limits and its own."""
    available = _read_machine_memory(proc / "meminfo")
    for names in _CGROUPS:
        numbers = [_read_number(cgroups / name) for name in names]
        if numbers[0] is not None and numbers[1] is not None:
            available = min(available, numbers[0] - numbers[1])
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _read_number(proc / "self" / "statm", first=True)
    if limit != resource.RLIM_INFINITY and taken is not None:
        available = min(available, limit - taken * os.sysconf("SC_PAGE_SIZE"))
    return max(available, 0)


def choose_cpu_cache_bytes(num_sharing: int) -> tuple[int, int]:
    """Chooses the bytes of a rank's cache by default, and the most that may be configured.

    A configured size is not divided among ranks: a rank that starts again finds that the others have taken theirs.
    """
    available = read_available_memory()
    return int(_AUTO_CPU_SHARE * available / num_sharing), int(_MOST_CPU_SHARE * available)


def read_free_cuda_memory(device: torch.device, fraction: float) -> int:
    """Reads the bytes still free of `fraction` of the GPU's memory; memory of other processes counts as used."""
    free, total = torch.cuda.mem_get_info(device)
    return int(fraction * total) - (total - free)


def _read_machine_memory(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _read_number(path: Path, *, first: bool = False) -> int | None:
    """Reads the number in a file, or the first of several; None if there is no such file, or it says `max`."""
    try:
        text = path.read_text()
        return int(text.split()[0] if first else text)
    except (OSError, ValueError, IndexError):
        return None
