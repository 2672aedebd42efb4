"""Memory of a GPU at addresses of its own (CUDA's virtual memory management): given back, and taken again there.

torch's allocator cannot give the memory of a tensor back and keep its address, which captured graphs hold. Here the
addresses are reserved once, and physical memory is mapped to them and taken away.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
PIECE = 1 << 30  # bytes of physical memory that are mapped at once
NOT_MAPPED = "the cache cannot give its memory back: it could not be mapped as the engine started, whose log says why"
_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3  # CU_MEM_LOCATION_TYPE, CU_MEM_ALLOCATION_TYPE, CU_MEM_ACCESS_FLAGS_PROT


class MemoryStaysError(Exception):
    """Memory cannot be given back, or not be taken again; the message says why."""


class Driver(Protocol):
    """The part of CUDA's driver that maps memory; all sizes are multiples of `granularity`. Raises MemoryStaysError."""

    @property
    def granularity(self) -> int: ...

    def reserve(self, num_bytes: int) -> int:
        """Returns the first address."""
        ...

    def create(self, num_bytes: int) -> int:
        """Takes physical memory; returns its handle."""
        ...

    def map(self, address: int, num_bytes: int, handle: int) -> None: ...

    def unmap(self, address: int, num_bytes: int) -> None: ...

    def release(self, handle: int) -> None: ...

    def free(self, address: int, num_bytes: int) -> None:
        """Gives reserved addresses back, to which nothing is mapped."""
        ...

    def wait(self) -> None:
        """Waits until the device has computed all that it was given."""
        ...


class VirtualMemory:
    """Bytes at fixed addresses, mapped at first. Memory and addresses are given back with the object."""

    def __init__(self, num_bytes: int, driver: Driver) -> None:
        self._driver = driver
        unit = driver.granularity
        self.num_bytes = -(-num_bytes // unit) * unit
        self._piece = max(unit, PIECE // unit * unit)
        self.address = driver.reserve(self.num_bytes)
        self._mapped: list[tuple[int, int, int]] = []  # address, bytes, handle
        end = weakref.finalize(self, _free, driver, self._mapped, self.address, self.num_bytes)
        end.atexit = False  # the driver may have ended before
        self.restore()

    @property
    def is_mapped(self) -> bool:
        return bool(self._mapped)

    @property
    def mapped_bytes(self) -> int:
        """How much physical memory it has now. Any thread may ask."""
        return sum(size for _, size, _ in tuple(self._mapped))

    def restore(self) -> None:
        """Takes the memory, whose contents are undefined. Raises MemoryStaysError when there is too little left."""
        if self._mapped:
            return
        try:
            for start in range(0, self.num_bytes, self._piece):
                size = min(self._piece, self.num_bytes - start)
                handle = self._driver.create(size)
                try:
                    self._driver.map(self.address + start, size, handle)
                except MemoryStaysError:
                    self._driver.release(handle)
                    raise
                self._mapped.append((self.address + start, size, handle))
        except MemoryStaysError:
            self.release()
            raise

    def release(self) -> None:
        """Gives the memory back; nothing may use it any more but what the device computes already."""
        _unmap(self._driver, self._mapped)


def _unmap(driver: Driver, mapped: list[tuple[int, int, int]]) -> None:
    if mapped:
        driver.wait()
    while mapped:
        address, size, handle = mapped.pop()
        driver.unmap(address, size)
        driver.release(handle)


def _free(driver: Driver, mapped: list[tuple[int, int, int]], address: int, num_bytes: int) -> None:
    _unmap(driver, mapped)
    driver.free(address, num_bytes)


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("gpu_direct", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Allocation(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class CudaDriver:
    """The driver itself, for one GPU whose context is the thread's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.wait()  # makes the context
        self._library: Any = ctypes.CDLL("libcuda.so.1")
        index = torch.cuda.current_device() if device.index is None else device.index
        self._location = _Location(_DEVICE, index)
        self._kind = _Allocation(type=_PINNED, location=self._location)
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._kind), ctypes.c_int(0))
        self.granularity = size.value

    def reserve(self, num_bytes: int) -> int:
        address, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), _size(num_bytes), _size(0), zero, zero)
        return address.value

    def create(self, num_bytes: int) -> int:
        handle = ctypes.c_uint64()
        kind = ctypes.byref(self._kind)
        self._call("cuMemCreate", ctypes.byref(handle), _size(num_bytes), kind, ctypes.c_uint64(0))
        return handle.value

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        where, zero = ctypes.c_uint64(address), ctypes.c_uint64(0)
        self._call("cuMemMap", where, _size(num_bytes), _size(0), ctypes.c_uint64(handle), zero)
        access = _Access(self._location, _READ_WRITE)
        self._call("cuMemSetAccess", where, _size(num_bytes), ctypes.byref(access), _size(1))

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), _size(num_bytes))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def free(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), _size(num_bytes))

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def _call(self, name: str, *args: object) -> None:
        result = getattr(self._library, name)(*args)
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(result), ctypes.byref(text))
            raise MemoryStaysError(f"{name}: {(text.value or b'unknown error').decode()}")


def _size(number: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(number)


class _Bytes:
    """What torch needs to make a tensor of memory that it did not allocate."""

    def __init__(self, memory: VirtualMemory) -> None:
        self.memory = memory  # lives as long as the tensor
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def view_memory(memory: VirtualMemory, device: torch.device) -> Tensor:
    """Views the memory as bytes [num_bytes]; it lives as long as the tensor does."""
    return torch.as_tensor(_Bytes(memory), device=device)


def map_memory(num_bytes: int, device: torch.device) -> VirtualMemory | None:
    """Returns memory of a GPU; None where its driver maps none, as some virtual GPUs' do not, or too little is left."""
    try:
        return VirtualMemory(num_bytes, CudaDriver(device))
    except MemoryStaysError as error:
        logger.info("the cache's memory is torch's, so the engine cannot sleep: %s", error)
        return None
