"""The actor of a replica: starts its engine, and ends with it.

Ray believes in a replica as long as its worker lives, and in a node as long as its raylet lives. So the worker ends at
once when its engine is lost, and when its raylet is gone: what a cut-off node computes, nobody waits for.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import ray
from ray.util import get_node_ip_address

from toka_async.ray.engine import ReplicaEngine
from toka_async.ray.status import ReplicaPlace, ReplicaPlan

WATCH_INTERVAL = 0.5  # seconds between two looks at the raylet and at the engine's process
HEALTH_EVERY = 4  # looks


class ReplicaActor:
    """A replica of a fleet. It has one life: a new one is a new actor."""

    def __init__(self, plan: ReplicaPlan) -> None:
        self._plan = plan
        self._engine: ReplicaEngine | None = None
        self._raylet = os.getppid()
        self._folder = TemporaryDirectory(prefix="toka-replica-")  # with its keys
        threading.Thread(target=self._watch, name="replica watch", daemon=True).start()

    async def start(self) -> ReplicaPlace:
        """Start the engine, and wait until it serves. Raises ReplicaStartError."""
        return await asyncio.to_thread(self._start)

    async def wait_end(self) -> NoReturn:
        """Wait for ever: the actor's end ends the call."""
        await asyncio.Event().wait()
        raise AssertionError

    async def drain(self) -> None:
        """Let running requests finish and end the engine, unless it has not started yet."""
        engine, self._engine = self._engine, None  # its end is wanted now
        if engine is not None:
            await asyncio.to_thread(engine.drain)

    def _start(self) -> ReplicaPlace:
        node = get_node_ip_address()
        host = f"[{node}]" if ":" in node else node
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        keys = self._plan.keys.write_for_server(Path(self._folder.name))
        bound = ["server.port=0", f"zmq.bind=tcp://{host}:*", *keys]
        engine = ReplicaEngine([*self._plan.overrides, *bound], gpus)
        engine.wait_serving()
        self._engine = engine
        return ReplicaPlace(engine.address, engine.url, node, os.getpid(), engine.process.pid)

    def _watch(self) -> None:
        num_looks = 0
        while True:
            time.sleep(WATCH_INTERVAL)
            if os.getppid() != self._raylet:
                self._end("its raylet is gone")
            engine, num_looks = self._engine, num_looks + 1
            if engine is None:
                continue
            if engine.process.poll() is not None or num_looks % HEALTH_EVERY == 0:
                problem = engine.find_problem()
                if problem is not None and self._engine is not None:
                    self._end(problem)

    def _end(self, reason: str) -> NoReturn:
        """End this process, and with it the engine. An exception would leave Ray a live actor without an engine."""
        sys.stderr.write(f"toka-async: the replica ends: {reason}\n")
        sys.stderr.flush()
        self._folder.cleanup()
        os._exit(1)
