"""How the ranks find a trainer's store, and what they say of one that is not there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes.serving import free_port
from toka_async.transfer.deadline import Deadline
from toka_async.transfer.errors import TransferError, TransferTimeoutError
from toka_async.transfer.store import open_store


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of somebody who listens and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_ranks_and_the_trainer_meet_whoever_comes_first() -> None:
    port, deadline = free_port(), Deadline(60)
    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(open_store, "127.0.0.1", port, 3, rank, deadline) for rank in (1, 2)]
        trainer = pool.submit(open_store, "127.0.0.1", port, 3, 0, deadline)
        trainer.result().set("word", "hello")
        assert [rank.result().get("word") for rank in ranks] == [b"hello"] * 2


def test_the_wait_for_a_trainer_ends_in_time() -> None:
    with pytest.raises(TransferTimeoutError, match=r"waiting for a trainer at .* within 0.2 s: Connection refused"):
        open_store("127.0.0.1", free_port(), 2, 1, Deadline(0.2))


def test_so_does_the_wait_for_its_first_word(silent: int) -> None:
    with pytest.raises(TransferTimeoutError, match=f"meeting at 127.0.0.1:{silent} did not end within 0.2 s"):
        open_store("127.0.0.1", silent, 2, 1, Deadline(0.2))


@pytest.mark.parametrize("address", ["\0", "tcp://x/../", "a" * 300])
def test_what_is_no_address_is_not_waited_for(address: str) -> None:
    with pytest.raises(TransferError, match="is no address"):
        open_store(address, 1, 2, 1, Deadline(60))
