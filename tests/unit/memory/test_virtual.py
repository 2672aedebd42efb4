"""Mapped memory over a driver that only notes what it is told."""

from __future__ import annotations

import pytest

from toka_async.memory import virtual
from toka_async.memory.virtual import MemoryStaysError, VirtualMemory

UNIT = 16


class NotingDriver:
    granularity = UNIT

    def __init__(self, room: int) -> None:
        self.room = room
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.num_handles = 0

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes % UNIT == 0
        return 4096

    def create(self, num_bytes: int) -> int:
        if num_bytes > self.room:
            raise MemoryStaysError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        self.room -= num_bytes
        self.num_handles += 1
        self.handles[self.num_handles] = num_bytes
        return self.num_handles

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        assert self.handles[handle] == num_bytes
        self.mapped[address] = num_bytes, handle

    def unmap(self, address: int, num_bytes: int) -> None:
        assert self.mapped.pop(address)[0] == num_bytes

    def release(self, handle: int) -> None:
        assert handle not in [each for _, each in self.mapped.values()]
        self.room += self.handles.pop(handle)


def test_memory_is_taken_again_at_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "PIECE", 2 * UNIT + 3)
    driver = NotingDriver(room=200)
    memory = VirtualMemory(5 * UNIT - 1, driver)
    assert memory.num_bytes == 5 * UNIT
    before = {address: size for address, (size, _) in driver.mapped.items()}
    assert before == {4096: 32, 4128: 32, 4160: 16}
    assert driver.room == 200 - 80
    for _ in range(2):
        memory.release()
    assert not memory.is_mapped
    assert not driver.mapped
    assert driver.room == 200
    for _ in range(2):
        memory.restore()
    assert {address: size for address, (size, _) in driver.mapped.items()} == before


def test_memory_that_others_took_meanwhile_is_missing_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "PIECE", UNIT)
    driver = NotingDriver(room=64)
    memory = VirtualMemory(64, driver)
    memory.release()
    driver.room = 40
    with pytest.raises(MemoryStaysError, match="OUT_OF_MEMORY"):
        memory.restore()
    assert not memory.is_mapped
    assert driver.room == 40
    driver.room = 64
    memory.restore()
    assert memory.is_mapped
