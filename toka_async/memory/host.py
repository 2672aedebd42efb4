"""Gives the memory behind a tensor back and keeps its address."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor


def discard_memory(tensor: Tensor) -> None:
    """Gives the whole pages of the system that a tensor on a CPU fills back to it; they read as zeros afterwards."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise")
