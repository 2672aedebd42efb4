"""The endpoint of direct submission with its sockets, keys, and the gate that checks clients.

Knows the configuration's keys; knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import zmq

from toka_async.config import ConfigError, ZmqConfig
from toka_async.listening import max_direct_connections
from toka_async.server.generate.service import Service
from toka_async.server.zmq.commands import Commands
from toka_async.server.zmq.endpoint import Endpoint
from toka_async.transport.curve import Clients, Gate, KeyFileError, check_clients, read_pair
from toka_async.transport.zmq_frames import RouterSocket

MOST_QUEUED = 256  # messages for a client that does not read
WAITING = 8  # times `max_body_mb`: data that arrived and was not read


class DirectServer:
    """Listens at `zmq.bind`. Needs a running event loop. Raises ConfigError, also for a wrong key file."""

    def __init__(self, config: ZmqConfig, service: Service, *, takes_commands: bool = False) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate: Gate | None = None
        try:
            keys = read_pair(Path(config.key)) if config.key else None
            if keys is not None:
                check_clients(Path(config.clients))
                self._gate = Gate(self._context, Path(config.clients))
                if config.admins:
                    check_clients(Path(config.admins))
            router = RouterSocket(
                self._context,
                config.bind,
                max_frame=service.config.max_body_mb << 20,
                max_queued=MOST_QUEUED,
                keys=keys,
                alive=config.grace,
                most_connections=max_direct_connections(config),
                most_bytes=WAITING * service.config.max_body_mb << 20,
            )
        except KeyFileError as error:
            raise ConfigError(f"zmq.key, zmq.clients, zmq.admins: {error}") from None
        except zmq.ZMQError as error:
            raise ConfigError(f"zmq.bind: cannot listen on {config.bind}: {error.strerror}") from None
        commands = Commands(service.engine.control, make_admin_check(config)) if takes_commands else None
        self.endpoint = Endpoint(router, service, config, commands)

    async def close(self, timeout: float) -> None:
        """Close after at most `timeout` seconds in which clients take what they are owed."""
        await self.endpoint.close(timeout)
        if self._gate is not None:
            self._gate.close()
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)


def make_admin_check(config: ZmqConfig) -> Callable[[str], bool]:
    """Makes what tells by a public key whether its owner may control the engine. Without keys, whoever gets here may.

    An address that others can reach without keys (`zmq.insecure`) admits nobody.
    """
    if not config.key:
        return lambda _: not config.insecure
    if not config.admins:
        return lambda _: False
    admins = Clients(Path(config.admins))
    return lambda key: bool(key) and admins.callback("", key.encode())
