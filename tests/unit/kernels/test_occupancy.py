from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from toka_async.kernels.occupancy import ProcessorLimits, count_resident, programs_per_sm

# CUDA C++ Programming Guide, technical specifications per compute capability.
A100 = ProcessorLimits(shared=164 << 10, warps=64, programs=32)
L4 = ProcessorLimits(shared=100 << 10, warps=48, programs=24)
H200 = ProcessorLimits(shared=228 << 10, warps=64, programs=32)


@pytest.mark.parametrize(
    ("limits", "shared", "registers", "warps", "expected"),
    [
        (H200, 38_912, 128, 2, 5),  # shared memory: each takes 1 KiB more
        (L4, 38_912, 128, 2, 2),
        (A100, 38_912, 128, 2, 4),
        (H200, 0, 255, 4, 2),  # registers: 8 warps of 255
        (H200, 0, 255, 1, 8),
        (H200, 0, 168, 2, 6),  # 12 warps, since each quarter of a multiprocessor has room for 3
        (H200, 0, 32, 1, 32),  # programs
        (L4, 0, 32, 1, 24),
        (H200, 0, 32, 8, 8),  # warps
        (L4, 0, 32, 8, 6),
        (L4, 101_376, 255, 8, 1),
        (L4, 200_000, 255, 16, 1),  # it would not start at all
    ],
)
def test_programs_of_a_multiprocessor(
    limits: ProcessorLimits, shared: int, registers: int, warps: int, expected: int
) -> None:
    assert programs_per_sm(shared, registers, warps, limits) == expected


@pytest.mark.parametrize(
    ("capability", "threads", "most"), [((8, 6), 1536, 16), ((8, 9), 1536, 24), ((9, 0), 2048, 32)], ids=str
)
def test_a_kernel_on_a_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], threads: int, most: int
) -> None:
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=10,
        max_threads_per_multi_processor=threads,
        shared_memory_per_multiprocessor=100 << 10,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    small = SimpleNamespace(metadata=SimpleNamespace(shared=0, num_warps=1), n_regs=16)
    large = SimpleNamespace(metadata=SimpleNamespace(shared=30 << 10, num_warps=4), n_regs=64)
    assert count_resident(small, torch.device("cuda")) == 10 * most
    assert count_resident(large, torch.device("cuda")) == 10 * 3
