"""What must be as it was when the storm is over: requests, pages, file descriptors, files, memory."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.service import Service

SESSIONS = "toka:zmq_clients"
ZERO = (
    *("toka:num_requests_running", "toka:num_requests_waiting", "toka:kv_cache_pages_used", "toka:requests_held"),
    *("toka:zmq_requests_held", SESSIONS, "toka:zmq_clients_connected", "toka:zmq_buffer_bytes"),
    *("toka:batches_open", "toka:batch_samples_in_flight", "toka:batches_paused", "toka:processes_silent"),
)
ZERO_COPY = 7  # descriptors that pyzmq opens for good when a process first sends a message that it does not copy


@dataclass(frozen=True, slots=True)
class Use:
    """Of a process: open descriptors, bytes of memory of its own."""

    pid: int
    num_fds: int
    memory: int


def uses(service: Service) -> dict[str, Use]:
    """Of every process, by name."""
    processes = {"parent": service.server.process.pid, **service.children()}
    found = {}
    for name, pid in processes.items():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
            memory = (sizes["Private_Clean"] + sizes["Private_Dirty"]) << 10
            found[name] = Use(pid, len(os.listdir(f"/proc/{pid}/fd")), memory)
        except OSError:  # gone meanwhile
            continue
    return found


async def rest(
    service: Service, baseline: dict[str, Use] | None, timeout: float, *, sessions: bool = True
) -> list[str]:
    """Waits until nothing is left of the storm; what is left after `timeout` seconds.

    sessions: those too whose client is gone without a word, and which the server keeps for `zmq.grace`.
    """
    deadline = time.monotonic() + timeout
    while left := [*await held(service, sessions), *more_descriptors(service, baseline or {})]:
        if time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)
    return []


async def held(service: Service, sessions: bool) -> list[str]:
    """What the server says that it still has."""
    load, metrics = await service.load(), await service.metrics()
    left = [f"/load: {load}"] if is_busy(load) else []
    left += [f"{name} is {metrics[name]:g}" for name in ZERO if metrics[name] and (sessions or name != SESSIONS)]
    owned = ("toka:held_requests", "toka:held_tokens", "toka:replica_outstanding_tokens")
    return left + [f"{name} is {value:g}" for name, value in metrics.items() if name.startswith(owned) and value]


def is_busy(load: dict[str, Any]) -> bool:
    counts = ("requests", "running", "waiting", "outstanding_tokens")
    return any(load[name] for name in counts) or any(each["state"] != "up" for each in load["replicas"])


def more_descriptors(service: Service, baseline: dict[str, Use]) -> list[str]:
    now = uses(service)
    return [
        f"{name} has {now[name].num_fds if name in now else None} descriptors, and had {use.num_fds}"
        for name, use in baseline.items()
        if name not in now or now[name].num_fds > use.num_fds + ZERO_COPY
    ]


def strange_files(service: Service, known: set[str]) -> list[str]:
    """What lies in the data folder and no client can ask for."""
    files = {path.name for path in (service.data_dir / "files").iterdir()}
    uploads = [path.name for path in (service.data_dir / "uploads").iterdir()]
    faults = [f"files that nobody knows: {sorted(files - known)}"] if files - known else []
    faults += [f"files are gone: {sorted(known - files)}"] if known - files else []
    return faults + ([f"uploads are left: {uploads}"] if uploads else [])
