"""The id of a communicator of NCCL, as vLLM's trainers leave it in a store: a pickled `ctypes` structure.

This is the only thing from the network that is unpickled, by an unpickler that makes nothing else.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from toka_async.transfer.errors import TransferError

SIZE = 128  # bytes
MOST_BYTES = 1024  # of the pickle
KEY = "broadcast_from/0/0"
_MODULE, _CLASS = "vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"


class _IdClass:
    """Stands for the class in the pickle."""


def _rebuild(kind: object, state: Any) -> bytes:
    """What `_ctypes._unpickle` does for one class: returns the bytes of the structure."""
    if kind is not _IdClass or not isinstance(state, tuple) or len(state) != 2 or not isinstance(state[1], bytes):
        raise pickle.UnpicklingError("it is no id")
    return state[1]


class _IdUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_MODULE, _CLASS):
            return _IdClass
        if (module, name) == ("_ctypes", "_unpickle"):
            return _rebuild
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def read_unique_id(data: bytes) -> bytes:
    """Raises TransferError for anything but a pickled id."""
    try:
        if len(data) > MOST_BYTES:
            raise pickle.UnpicklingError(f"it has {len(data)} bytes")
        value = _IdUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # wrong pickles raise anything
        raise TransferError(f"the trainer's ncclUniqueId cannot be read: {error}") from None
    if not isinstance(value, bytes) or len(value) != SIZE:
        raise TransferError("the trainer's ncclUniqueId cannot be read: it is no id of 128 bytes")
    return value


def write_unique_id(value: bytes) -> bytes:
    """Pickles an id as vLLM does: `_ctypes._unpickle(ncclUniqueId, ({}, value))`."""
    assert len(value) == SIZE
    names = b"c_ctypes\n_unpickle\n" + f"c{_MODULE}\n{_CLASS}\n".encode()
    return b"\x80\x03" + names + b"}" + b"C" + bytes([SIZE]) + value + b"\x86\x86R."
