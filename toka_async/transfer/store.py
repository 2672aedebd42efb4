"""The store at which a trainer and the engine's ranks meet: it is found, or the wait ends in time."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from threading import Thread

from torch._C._distributed_c10d import TCPStore

from toka_async.transfer.deadline import Deadline
from toka_async.transfer.errors import TransferError, TransferTimeoutError

EVERY = 0.05  # seconds between two attempts to connect
LONGEST = 5.0  # seconds of one


def open_store(address: str, port: int, world_size: int, rank: int, deadline: Deadline) -> TCPStore:
    """Returns when all ranks have come; rank 0, the trainer, makes the store.

    Raises TransferError when there is none in time, and RuntimeError when torch finds it wrong.
    """
    if rank:
        find_listener(address, port, deadline)
    opened: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            store = TCPStore(address, port, world_size, rank == 0, deadline.left, multi_tenant=True, use_libuv=False)
        except Exception as error:
            opened.set_exception(error)
        else:
            opened.set_result(store)

    # torch waits for ever for the first word of a listener, so the wait is a thread that can be left behind.
    Thread(target=connect, daemon=True).start()
    try:
        return opened.result(deadline.left.total_seconds())
    except TimeoutError:
        raise deadline.make_error(f"meeting at {address}:{port}") from None


def find_listener(address: str, port: int, deadline: Deadline) -> None:
    """Waits until somebody listens. torch would wait for almost twice its time-out, for names that are wrong too."""
    problem = ""

    def is_there() -> bool:
        nonlocal problem
        try:
            socket.create_connection((address, port), min(LONGEST, deadline.left.total_seconds())).close()
        except socket.gaierror as error:
            raise TransferError(f"{address!r} is no address: {error.strerror}") from None
        except ValueError as error:
            raise TransferError(f"{address!r} is no address: {error}") from None
        except OSError as error:
            problem = error.strerror or str(error)
            return False
        return True

    try:
        deadline.wait_until(is_there, f"waiting for a trainer at {address}:{port}", EVERY)
    except TransferTimeoutError as error:
        raise TransferTimeoutError(f"{error}: {problem}") from None
