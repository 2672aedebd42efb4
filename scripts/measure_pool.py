"""A pool whose replicas are killed and replaced: counts the ends of requests, and what the pool costs.

    PYTHONPATH=. python scripts/measure_pool.py fakes  # 200 fake replicas, 20 of them replaced, 100,000 requests
    PYTHONPATH=. python scripts/measure_pool.py servers  # 3 servers on simulated ranks, 20 kills, 20,000 requests
    PYTHONPATH=. python scripts/measure_pool.py choice  # how long it takes to choose one of 1,000 replicas

Fails if a request is lost, answered wrongly or answered twice.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
from pathlib import Path
from random import Random

import numpy as np

from tests.chaos.pools import PoolTally, run_fakes, run_one_fake, run_servers
from toka_async.client.replica_choice import ReplicaChoice, ReplicaRoom, hash_prefix

NUM_CHOICES = 100_000


def report(name: str, tally: PoolTally, num_requests: int) -> None:
    print(
        f"{name}: {tally.ends} requests ended in {tally.seconds:.1f} s, {tally.wrong} wrong, {tally.late} late, "
        f"{tally.broken} streams broken, {tally.kills} replicas replaced; "
        f"CPU us a request: {tally.cpu_seconds / num_requests * 1e6:.1f}; descriptors: {tally.descriptors}; "
        f"peak MiB: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    assert (tally.ends, tally.wrong) == (num_requests, 0)


async def measure_fakes(num_replicas: int, num_requests: int, num_kills: int) -> None:
    report("Client, one replica", await run_one_fake(num_requests), num_requests)
    report(f"Pool, {num_replicas} replicas", await run_fakes(num_replicas, num_requests, num_kills), num_requests)


async def measure_servers(num_requests: int, num_kills: int) -> None:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        os.environ["TMPDIR"] = folder  # where servers make their socket folders
        report("Pool, 3 servers", await run_servers(Path(folder), num_requests, num_kills, say=print), num_requests)


def measure_choice(num_replicas: int) -> None:
    choice: ReplicaChoice[ReplicaRoom] = ReplicaChoice(Random(0))
    for number in range(num_replicas):
        choice.add(ReplicaRoom(f"tcp://10.0.{number >> 8}.{number & 255}:10211", 1 << 20, 1 << 20))
    prompts = np.random.default_rng(0).integers(0, 1 << 30, (NUM_CHOICES, 32), np.int32)
    began = time.process_time()
    for prompt in prompts:
        choice.find_room(1)
        choice.find_owner(hash_prefix(prompt, ""))
    print(f"{num_replicas} replicas: {(time.process_time() - began) / NUM_CHOICES * 1e6:.1f} us a choice")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fakes", "servers", "choice"])
    parser.add_argument("--replicas", type=int, help="default: 200 fakes, or 1,000 to choose from")
    parser.add_argument("--requests", type=int, help="default: 100,000 to fakes, 20,000 to servers")
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    if args.what == "choice":
        measure_choice(args.replicas or 1000)
    elif args.what == "fakes":
        asyncio.run(measure_fakes(args.replicas or 200, args.requests or 100_000, args.kills))
    else:
        asyncio.run(measure_servers(args.requests or 20_000, args.kills))


if __name__ == "__main__":
    main()
