"""A server whose clients vanish without a word, in a network of its own: run by `tests/e2e/test_load.py`.

Prints which requests of clients that are gone are cancelled: ids, in order of arrival.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from contextlib import closing

from tests.drivers.until import until
from tests.drivers.web_server import web_server
from tests.fakes.scheduler import FakeScheduler
from toka_async.config import ServerConfig
from toka_async.listening import open_listener
from toka_async.server.http.acceptor import Acceptor

TIMEOUT = 2.0  # seconds, `limits.client_timeout`


def set_network(state: str) -> None:
    """Of this namespace: nothing that is sent arrives while it is down, and nobody is told."""
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def asking(address: tuple[str, int]) -> socket.socket:
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 5}).encode()
    client = socket.create_connection(address)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return client


async def main() -> None:
    """One client of the server's own listener, one of a listener without its options."""
    set_network("up")
    async with web_server(FakeScheduler(held=True)) as server:
        listener = open_listener(ServerConfig(port=0), TIMEOUT)
        await Acceptor(server.runner, listener, 100, TIMEOUT).start()
        with closing(asking(listener.getsockname())):
            await until(lambda: server.engine.num_requests == 1)
            with closing(asking(server.address)):
                await until(lambda: server.engine.num_requests == 2)
                set_network("down")
                await until(lambda: server.engine.num_requests == 1)
            server.scheduler.step()  # takes what it was sent
            print(server.scheduler.cancelled, flush=True)
            server.engine.fail_all("the test is over")


if __name__ == "__main__":
    asyncio.run(main())
