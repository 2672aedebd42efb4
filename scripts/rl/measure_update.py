"""Seconds of an update of all weights, beside what its bytes take at the speed of the way they go.

    python scripts/rl/measure_update.py MODEL nccl model.load=random                     # trainer on the second GPU
    python scripts/rl/measure_update.py MODEL cuda cache.memory_fraction=0.5             # both on one GPU
    python scripts/rl/measure_update.py MODEL shm model.load=random
    python scripts/rl/measure_update.py demo shm model.device=cpu
    python scripts/rl/measure_update.py MODEL cuda --bucket-mib 1024 2048 4096

Starts a server, gives it random weights several times, and compares the checksums of the last ones. The speed is that
of copying 1 GiB the same way: from GPU to GPU, on one GPU, or from memory that is not pinned. The checksums of weights
that the engine quantizes differ from the trainer's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import time
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from toka_async.bench.loads.served import serve
from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.spec import read_spec
from toka_async.client import Client, Trainer
from toka_async.control import Broadcast, NcclTransfer
from toka_async.model.weights import build_decoder
from toka_async.transfer.checksum import sum_tensors
from toka_async.transfer.deadline import Deadline
from toka_async.transfer.nccl import NcclCommunicator, join_nccl
from toka_async.transfer.tensors import describe_tensor
from toka_async.transfer.wire import send_tensors
from toka_async.weights.catalog import WeightCatalog

ROUNDS = 6  # the first one does not count
COPIED = 1 << 30  # bytes of a copy
SECONDS = 300.0


def make_tensors(model: Path, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Makes a checkpoint of small random numbers."""
    maker = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(maker).manual_seed(seed)
    expected = WeightCatalog(build_decoder(read_spec(model), dtype, torch.device("meta"))).tensors
    return {
        name: torch.randn(each.shape, generator=generator, device=maker, dtype=dtype).mul_(0.01).to(device)
        for name, each in expected.items()
    }


def measure_copy(source: torch.device, target: torch.device) -> float:
    """Returns the bytes a second of copies of 1 GiB, the median of five."""
    one, other = (torch.zeros(COPIED, dtype=torch.uint8, device=device) for device in (source, target))
    times = []
    for _ in range(6):
        synchronize(source, target)
        began = time.perf_counter()
        other.copy_(one)
        synchronize(source, target)
        times.append(time.perf_counter() - began)
    return COPIED / statistics.median(times[1:])


def synchronize(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class Sender(ABC):
    """One way from this process to the server's rank. open: before the first update."""

    def __init__(self, trainer: Trainer, device: torch.device, bucket_bytes: int) -> None:
        self.trainer = trainer
        self.device = device
        self.bucket_bytes = bucket_bytes

    async def open(self) -> None:  # noqa: B027  # some ways need nothing
        pass

    def describe(self) -> str:
        return ""

    @abstractmethod
    async def send(self, tensors: dict[str, Tensor]) -> None:
        """Give the server all tensors."""


class NcclSender(Sender):
    async def open(self) -> None:
        port = find_port()
        transfer = NcclTransfer(address="127.0.0.1", port=port, rank_offset=1, world_size=2, packed=True)
        join = asyncio.to_thread(join_nccl, transfer, 0, self.device, Deadline(SECONDS))
        joined, _ = await asyncio.gather(join, self.trainer.open_transfer(transfer))
        self.group: NcclCommunicator = joined

    async def send(self, tensors: dict[str, Tensor]) -> None:
        await self.trainer.begin_update()
        infos = [describe_tensor(*each) for each in tensors.items()]
        sent = asyncio.to_thread(send_tensors, self.group, tensors.items(), Deadline(SECONDS))
        await asyncio.gather(sent, self.trainer.load(Broadcast(transfer="nccl"), infos))
        await self.trainer.finish_update()


class BucketSender(Sender):
    def describe(self) -> str:
        return f", in buckets of {self.bucket_bytes >> 20} MiB"

    async def send(self, tensors: dict[str, Tensor]) -> None:
        device = self.device if self.device.type == "cuda" else None
        await self.trainer.update(tensors.items(), bucket_bytes=self.bucket_bytes, device=device)


SENDERS: dict[str, type[Sender]] = {"nccl": NcclSender, "cuda": BucketSender, "shm": BucketSender}


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def measure(model: Path, way: str, bucket_mib: list[int], overrides: list[str]) -> None:
    has_gpu = torch.cuda.is_available()
    engine = torch.device("cuda:0" if has_gpu else "cpu")
    own = torch.device({"nccl": "cuda:1", "cuda": "cuda:0"}.get(way, "cpu"))
    dtype = torch.bfloat16 if has_gpu else torch.float32
    address = f"tcp://127.0.0.1:{find_port()}"
    own_overrides = [f"model.path={model}", f"zmq.bind={address}", "server.admin=true"]
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    with serve([*own_overrides, *overrides]):
        speed = measure_copy(own, engine)
        async with Client(address) as client:
            for size in bucket_mib:
                sender = SENDERS[way](Trainer(client), own, size << 20)
                await sender.open()
                times = []
                for seed in range(ROUNDS):
                    tensors = await asyncio.to_thread(make_tensors, model, dtype, own, seed)
                    synchronize(own)
                    began = time.perf_counter()
                    await sender.send(tensors)
                    times.append(time.perf_counter() - began)
                sums = await asyncio.to_thread(sum_tensors, {n: t.to(engine) for n, t in tensors.items()})
                found = await sender.trainer.checksum()
                same = sum(found[name] == value for name, value in sums.items())
                num_bytes = sum(tensor.nbytes for tensor in tensors.values())
                seconds, floor = statistics.median(times[1:]), num_bytes / speed
                print(
                    f"{way}: {num_bytes / 1e9:.2f} GB in {seconds:.4f} s (first {times[0]:.3f}){sender.describe()}; "
                    f"a copy takes {floor:.4f} s at {speed / 1e9:.0f} GB/s: {seconds / floor:.2f} times; checksums of "
                    f"{same} of {len(sums)} tensors are equal"
                )
                exact = not any("quantize" in each for each in overrides)
                assert same == len(sums) or not exact, "the engine has other weights"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, or demo")
    parser.add_argument("way", choices=SENDERS)
    parser.add_argument("--bucket-mib", type=int, nargs="+", help="sizes of buckets of shared memory (1024)")
    args, overrides = parser.parse_known_args()
    if args.bucket_mib and SENDERS[args.way] is not BucketSender:
        parser.error(f"--bucket-mib: {args.way} has no buckets")
    asyncio.run(measure(resolve_model(args.model), args.way, args.bucket_mib or [1024], overrides))


if __name__ == "__main__":
    main()
