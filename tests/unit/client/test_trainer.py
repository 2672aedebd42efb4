from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from toka_async.client.client import Client
from toka_async.client.errors import CommandError
from toka_async.client.trainer import NUM_BUCKETS, Trainer

TENSORS = [(f"t{number}", torch.full((4,), float(number))) for number in range(9)]
BUCKET = 16  # bytes: one of the tensors


class Server:
    """Answers commands in order, each after a while; fails those of one name."""

    def __init__(self, failing: str = "", slow: str = "") -> None:
        self.ended: list[str] = []
        self.most_loads = self._num_loads = 0
        self._failing = failing
        self._slow = slow
        self._turn = asyncio.Lock()

    async def command(self, command: str, args: Mapping[str, Any]) -> None:
        self._num_loads += command == "load"
        self.most_loads = max(self.most_loads, self._num_loads)
        async with self._turn:
            await asyncio.sleep(9.0 if command == self._slow else 0.001)
            self._num_loads -= command == "load"
            if command == self._failing:
                raise CommandError(f"no {command}")
            self.ended.append(f"load {' '.join(args['names'])}" if command == "load" else command)


def update(server: Server, timeout: float = 5.0) -> None:
    async def run() -> None:
        trainer = Trainer(cast(Client, server))
        await asyncio.wait_for(trainer.update(TENSORS, bucket_bytes=BUCKET), timeout)

    try:
        asyncio.run(run())
    finally:
        assert not [*Path("/dev/shm").glob(f"toka-{os.getpid()}-*")], "a bucket stays"


def test_loads_are_sent_ahead_between_begin_and_end() -> None:
    server = Server()
    update(server)
    assert server.ended == ["begin_update", *(f"load {name}" for name, _ in TENSORS), "finish_update"]
    assert server.most_loads == NUM_BUCKETS - 1


def test_a_refused_begin_leaves_an_open_update_alone() -> None:
    server = Server(failing="begin_update")
    with pytest.raises(CommandError, match="no begin_update"):
        update(server)
    assert server.ended == []
    assert not server.most_loads


def test_a_failed_load_is_not_finished() -> None:
    server = Server(failing="load")
    with pytest.raises(CommandError, match="no load"):
        update(server)
    assert "finish_update" not in server.ended


def test_an_update_that_is_cut_off_is_abandoned() -> None:
    server = Server(slow="load")
    with pytest.raises(TimeoutError):
        update(server, timeout=0.1)
    assert server.ended == ["begin_update", "abandon_update"]
