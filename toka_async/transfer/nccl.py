"""A communicator of NCCL apart from torch, as vLLM's trainers make one, with ends for all that may wait for ever.

torch cannot join a communicator whose id somebody else made, so the library is called by `ctypes`. Communicators are
non-blocking: calls return at once, and what takes too long is aborted.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from toka_async.control import NcclTransfer
from toka_async.transfer.deadline import Deadline
from toka_async.transfer.errors import TransferError
from toka_async.transfer.store import open_store
from toka_async.transfer.unique_id import KEY, SIZE, read_unique_id, write_unique_id

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8, _FLOAT32, _SUM = 1, 7, 0
_MAGIC, _VERSION, _UNDEFINED = 0xCAFEBEEF, 21700, -(2**31)


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * SIZE)]


class _Options(ctypes.Structure):
    """`ncclConfig_t` as of NCCL 2.17; later ones take its size and version into account."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


class NcclCommunicator:
    """This process's end. Calls that need the other ends take a deadline, and raise TransferError.

    Its stream is kept from update to update: memory that another stream uses is not reused at once.
    """

    def __init__(
        self,
        unique_id: bytes,
        rank: int,
        size: int,
        device: torch.device,
        deadline: Deadline,
        packed: bool = False,
        buffer_bytes: int = 1 << 30,
    ) -> None:
        self.device = device
        self.packed = packed
        self.buffer_bytes = buffer_bytes
        self._library = load_library()
        self._comm: ctypes.c_void_p | None = None
        self._rank = rank
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        options = _Options(
            size=ctypes.sizeof(_Options),
            magic=_MAGIC,
            version=_VERSION,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED,
            net_name=None,
            split_share=_UNDEFINED,
        )
        comm = ctypes.c_void_p()
        given = UniqueId.from_buffer_copy(unique_id)
        result = self._library.ncclCommInitRankConfig(
            ctypes.byref(comm), ctypes.c_int(size), given, ctypes.c_int(rank), ctypes.byref(options)
        )
        self._comm = comm
        self._finish(result, deadline, f"joining as rank {rank} of {size}")
        self._warm_up(deadline)

    def _warm_up(self, deadline: Deadline) -> None:
        """vLLM's ends all do this when they have joined, and wait for each other in it."""
        number = torch.zeros(1, dtype=torch.float32, device=self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        pointer = ctypes.c_void_p(number.data_ptr())
        result = self._library.ncclAllReduce(
            pointer, pointer, ctypes.c_size_t(1), _FLOAT32, _SUM, self._comm, ctypes.c_void_p(self._stream.cuda_stream)
        )
        self._finish(result, deadline, "the first exchange")
        self._wait(deadline, "the first exchange")

    def broadcast(self, tensor: Tensor, deadline: Deadline) -> None:
        """See BroadcastGroup."""
        if self._comm is None:
            raise TransferError("the communicator is closed")
        if not tensor.numel():
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        pointer = ctypes.c_void_p(tensor.data_ptr())
        result = self._library.ncclBroadcast(
            pointer,
            pointer,
            ctypes.c_size_t(tensor.nbytes),
            _UINT8,
            ctypes.c_int(0),
            self._comm,
            ctypes.c_void_p(self._stream.cuda_stream),
        )
        self._finish(result, deadline, "a broadcast")
        self._wait(deadline, "a broadcast")

    def _wait(self, deadline: Deadline, what: str) -> None:
        """Waits until the stream has done all, or the communicator has failed."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)

        def is_done() -> bool:
            self._check(self._get_error(), what)
            return bool(done.query())  # type: ignore[no-untyped-call]

        try:
            deadline.wait_until(is_done, what)
        except TransferError:
            self.close()
            raise
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _finish(self, result: int, deadline: Deadline, what: str) -> None:
        """Waits until a call that has returned is done."""
        try:
            self._check(result, what)
            deadline.wait_until(lambda: self._check(self._get_error(), what) == _SUCCESS, what)
        except TransferError:
            self.close()
            raise

    def _get_error(self) -> int:
        state = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(state)), "asking for errors")
        return state.value

    def _check(self, result: int, what: str) -> int:
        if result not in (_SUCCESS, _IN_PROGRESS):
            text = self._library.ncclGetErrorString(result).decode()
            raise TransferError(f"NCCL, {what}: {text}")
        return result

    def close(self) -> None:
        """See BroadcastGroup."""
        comm, self._comm = self._comm, None
        if comm:
            self._library.ncclCommAbort(comm)


def load_library() -> Any:
    """The library that torch uses. Raises TransferError where there is none."""
    try:
        torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        library = ctypes.CDLL("libnccl.so.2")
    except (OSError, AttributeError, RuntimeError) as error:
        raise TransferError(f"NCCL cannot be used here: {error}") from None
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        UniqueId,
        ctypes.c_int,
        ctypes.POINTER(_Options),
    ]
    return library


def make_unique_id() -> bytes:
    """A new id, by the trainer."""
    unique_id = UniqueId()
    if load_library().ncclGetUniqueId(ctypes.byref(unique_id)) != _SUCCESS:
        raise TransferError("NCCL made no id")
    return bytes(unique_id)


def join_nccl(transfer: NcclTransfer, rank: int, device: torch.device, deadline: Deadline) -> NcclCommunicator:
    """Joins as `rank` of the communicator; rank 0, the trainer, makes the store with the id. Raises TransferError."""
    unique_id = transfer.unique_id
    try:
        if not unique_id:
            store = open_store(transfer.address, transfer.port, transfer.world_size, rank, deadline)
            if rank == 0:
                unique_id = make_unique_id()
                store.set(KEY, write_unique_id(unique_id))  # type: ignore[arg-type]  # bytes are right
            else:
                unique_id = read_unique_id(store.get(KEY))
    except (RuntimeError, ValueError, TransferError) as error:
        raise TransferError(
            f"rank {rank} of {transfer.world_size} found no ncclUniqueId at {transfer.address}:{transfer.port}: "
            f"{str(error).partition(chr(10))[0][:300]}"
        ) from None
    if len(unique_id) != SIZE:
        raise TransferError(f"an ncclUniqueId has {SIZE} bytes, not {len(unique_id)}")
    return NcclCommunicator(
        unique_id, rank, transfer.world_size, device, deadline, transfer.packed, transfer.buffer_bytes
    )
