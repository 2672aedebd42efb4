"""A communicator of NCCL between a trainer and a rank on two GPUs, as vLLM's trainers make it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from tests.processes.serving import free_port
from toka_async.control import NcclTransfer
from toka_async.transfer.deadline import Deadline
from toka_async.transfer.errors import TransferError, TransferTimeoutError
from toka_async.transfer.nccl import join_nccl
from toka_async.transfer.tensors import describe_tensor
from toka_async.transfer.wire import receive_tensors, send_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
TIMEOUT = 120.0


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(1000, 33, generator=generator).bfloat16(),
        "odd": torch.randn(7, generator=generator).to(torch.float8_e4m3fn),
        "b": torch.randn(513, 1024, generator=generator),
    }


def receive(transfer: NcclTransfer, path: Path) -> None:
    """A rank of an engine, in a process of its own, on the second GPU."""
    device, deadline = torch.device("cuda:1"), Deadline(TIMEOUT)
    torch.cuda.set_device(device)
    group = join_nccl(transfer, 1, device, deadline)
    infos = [describe_tensor(*each) for each in make_tensors().items()]
    torch.save({name: tensor.cpu().clone() for name, tensor in receive_tensors(group, infos, deadline)}, path)
    group.close()


@pytest.mark.parametrize("packed", [False, True])
def test_tensors_arrive_on_another_gpu(tmp_path: Path, packed: bool) -> None:
    port, path = free_port(), tmp_path / "received"
    transfer = NcclTransfer(
        address="127.0.0.1", port=port, rank_offset=1, world_size=2, packed=packed, buffer_bytes=1 << 16
    )
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(transfer, path))
    process.start()
    try:
        deadline = Deadline(TIMEOUT)
        group = join_nccl(transfer, 0, torch.device("cuda:0"), deadline)
        send_tensors(group, make_tensors().items(), deadline)
        process.join(TIMEOUT)
        assert process.exitcode == 0
        group.close()
    finally:
        process.kill()
    received = torch.load(path)
    for name, tensor in make_tensors().items():
        assert torch.equal(received[name].float(), tensor.float()), name


def test_nobody_waits_for_a_trainer_that_does_not_come() -> None:
    transfer = NcclTransfer(unique_id=bytes(128), rank_offset=1, world_size=2)
    with pytest.raises((TransferError, TransferTimeoutError)):
        join_nccl(transfer, 1, torch.device("cuda:0"), Deadline(2.0))
