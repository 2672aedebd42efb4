"""An engine that an actor of a trainer starts for itself, with its client and what a trainer does with it.

The engine ends with its process. Its socket is in a folder that only this user can enter; its HTTP server is for this
machine, unless the options say otherwise. Knows no trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from toka_async.client import Client, Trainer
from toka_async.ray.engine import ReplicaEngine, ReplicaStartError
from toka_async.ray.fleet import list_overrides
from toka_async.socket_folder import socket_folder


class HostedEngine:
    """Its log goes to this process's standard error.

    Args:
        options: the configuration, as for `Fleet`.
        gpus: ids for CUDA_VISIBLE_DEVICES; empty: as in this process's environment.

    Attributes:
        client, trainer: once `start` has returned.
        max_context: most tokens of prompt and completion together.

    Raises:
        ConfigError: an option is wrong.
    """

    client: Client
    trainer: Trainer
    max_context: int

    def __init__(self, model: str, options: Mapping[str, Any], gpus: Sequence[str] = ()) -> None:
        overrides = list_overrides(model, {"server.admin": True, "server.page": False, **options})
        self._folder = ExitStack()
        address = f"ipc://{self._folder.enter_context(socket_folder())}/direct"
        self._process = ReplicaEngine([*overrides, "server.port=0", f"zmq.bind={address}"], gpus)

    @property
    def url(self) -> str:
        """Of its HTTP server."""
        return self._process.url

    async def start(self) -> None:
        """Wait until it serves. Raises ReplicaStartError."""
        try:
            await asyncio.to_thread(self._process.wait_serving)
        except ReplicaStartError:
            self._folder.close()
            raise
        self.client = await Client(self._process.address).__aenter__()
        self.trainer = Trainer(self.client)
        assert self.client.welcome is not None
        self.max_context = self.client.welcome.max_context

    async def stop(self) -> None:
        """End it with all of its requests."""
        await self.client.__aexit__(None, None, None)
        await asyncio.to_thread(self._process.kill)
        self._folder.close()
