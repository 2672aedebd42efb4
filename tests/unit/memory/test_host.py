from __future__ import annotations

from pathlib import Path

import torch

from toka_async.memory.host import discard_memory

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_is_given_back_and_reads_as_zeros() -> None:
    tensor = torch.ones(16 * MIB, dtype=torch.float32)
    before, address = resident_bytes(), tensor.data_ptr()
    discard_memory(tensor)
    assert before - resident_bytes() > 60 * MIB
    assert tensor.data_ptr() == address
    assert int(tensor[1024:-1024].count_nonzero()) == 0
    tensor.fill_(2)
    assert float(tensor.sum()) == 32 * MIB


def test_less_than_a_page_stays() -> None:
    tensor = torch.ones(3)
    discard_memory(tensor)
    assert tensor.tolist() == [1, 1, 1]
