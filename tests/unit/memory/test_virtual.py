"""Mapped memory over a driver that only notes what it is told."""

from __future__ import annotations

import logging

import pytest
import torch

from toka_async.memory import virtual
from toka_async.memory.virtual import MemoryStaysError, VirtualMemory, map_memory

UNIT = 16


class NotingDriver:
    granularity = UNIT

    def __init__(self, room: int) -> None:
        self.room = room
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.num_handles = 0
        self.reserved: dict[int, int] = {}
        self.is_busy = False  # with what may use the memory

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes % UNIT == 0
        address = 4096 * (1 + len(self.reserved))
        self.reserved[address] = num_bytes
        return address

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
        assert not self.is_busy
        assert self.mapped.pop(address)[0] == num_bytes

    def release(self, handle: int) -> None:
        assert handle not in [each for _, each in self.mapped.values()]
        self.room += self.handles.pop(handle)

    def free(self, address: int, num_bytes: int) -> None:
        assert self.reserved.pop(address) == num_bytes
        assert not [each for each in self.mapped if address <= each < address + num_bytes]

    def wait(self) -> None:
        self.is_busy = False


def test_memory_is_taken_again_at_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "PIECE", 2 * UNIT + 3)
    driver = NotingDriver(room=200)
    memory = VirtualMemory(5 * UNIT - 1, driver)
    assert memory.num_bytes == memory.mapped_bytes == 5 * UNIT
    before = {address: size for address, (size, _) in driver.mapped.items()}
    assert before == {4096: 32, 4128: 32, 4160: 16}
    assert driver.room == 200 - 80
    for _ in range(2):
        memory.release()
    assert not memory.is_mapped
    assert memory.mapped_bytes == 0
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


@pytest.mark.parametrize("is_released", [False, True])
def test_memory_and_addresses_end_with_the_object(monkeypatch: pytest.MonkeyPatch, is_released: bool) -> None:
    monkeypatch.setattr(virtual, "PIECE", UNIT)
    driver = NotingDriver(room=64)
    memory = VirtualMemory(64, driver)
    driver.is_busy = True
    if is_released:
        memory.release()
    else:
        assert driver.room == 0
    del memory
    assert driver.room == 64
    assert not driver.reserved


def test_a_driver_that_maps_no_memory_leaves_it_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = NotingDriver(room=64)
    monkeypatch.setattr(virtual, "CudaDriver", lambda device: driver)  # noqa: ARG005
    memory = map_memory(64, torch.device("cuda:0"))
    assert memory is not None
    assert memory.is_mapped
    with caplog.at_level(logging.INFO):
        assert map_memory(64, torch.device("cuda:0")) is None
    assert "the engine cannot sleep: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
