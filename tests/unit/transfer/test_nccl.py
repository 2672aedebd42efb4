"""How both ends of a communicator find its id; the communicator itself needs GPUs (tests/gpu/trainers)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from tests.processes.serving import free_port
from toka_async.control import NcclTransfer
from toka_async.transfer import nccl
from toka_async.transfer.deadline import Deadline
from toka_async.transfer.errors import TransferError
from toka_async.transfer.nccl import NcclCommunicator, join_nccl

ID = bytes(range(128))
DEVICE = torch.device("cuda:0")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, int, int]]:
    """Id, rank and size of each that joins."""
    calls: list[tuple[bytes, int, int]] = []
    all_joined = Barrier(3)

    def join(unique_id: bytes, rank: int, size: int, *_: Any) -> None:
        calls.append((unique_id, rank, size))
        if size == 3:
            all_joined.wait(60)  # as NCCL does

    monkeypatch.setattr(nccl, "NcclCommunicator", join)
    monkeypatch.setattr(nccl, "make_unique_id", lambda: ID)
    return calls


def test_ranks_get_the_id_that_the_trainer_makes(joined: list[tuple[bytes, int, int]]) -> None:
    transfer = NcclTransfer(address="127.0.0.1", port=free_port(), rank_offset=1, world_size=3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda rank: join_nccl(transfer, rank, DEVICE, Deadline(30)), range(3)))
    assert sorted(joined, key=lambda call: call[1]) == [(ID, 0, 3), (ID, 1, 3), (ID, 2, 3)]


def test_an_id_can_be_given(joined: list[tuple[bytes, int, int]]) -> None:
    join_nccl(NcclTransfer(unique_id=ID, rank_offset=1, world_size=2), 1, DEVICE, Deadline(30))
    assert joined == [(ID, 1, 2)]
    with pytest.raises(TransferError, match="has 128 bytes, not 3"):
        join_nccl(NcclTransfer(unique_id=b"abc", rank_offset=1, world_size=2), 1, DEVICE, Deadline(30))


@pytest.mark.usefixtures("joined")
def test_nobody_waits_for_a_trainer_that_is_not_there() -> None:
    transfer = NcclTransfer(address="127.0.0.1", port=free_port(), rank_offset=1, world_size=2)
    with pytest.raises(TransferError, match="rank 1 of 2 found no ncclUniqueId at"):
        join_nccl(transfer, 1, DEVICE, Deadline(0.2))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch brings NCCL")
def test_without_the_library_the_reason_is_said() -> None:
    with pytest.raises(TransferError, match="NCCL cannot be used here"):
        NcclCommunicator(ID, 1, 2, DEVICE, Deadline(1))
