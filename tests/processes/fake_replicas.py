"""Many servers of direct submission in one process, which answer everything alike: for tests of a pool.

Each row's tokens are the request's seed, so that a test can tell whose answer it is. The process says an address a
line, as many as it was told. For each number on standard input it ends that replica without a word, with what it has
not answered, and says the address of the one in its place.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq

from toka_async.protocol import VERSIONS, Columns, Hello, Results, Submission, Welcome, from_client, pack

TICK = 0.01  # seconds in which what has come is answered together
SEQS = 64
WELCOME = Welcome(
    version=VERSIONS[-1],
    resumed=False,
    credit=1 << 14,
    window=1 << 14,
    heartbeat=3600.0,
    max_seqs=SEQS,
    model="fake",
    vocab_size=1 << 30,
    max_context=1 << 20,
    max_n=1 << 10,
    max_message=1 << 26,
)


class FakeReplica:
    """One client at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> None:
        self._poller = poller
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind("tcp://127.0.0.1:*")
        self.url = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._client = b""
        self._seq = 0
        self._asked: list[tuple[Submission, Columns]] = []
        poller.register(self.socket, zmq.POLLIN)

    def hear(self) -> None:
        while self.socket.poll(0):
            self._client, *frames = self.socket.recv_multipart()
            header, columns = from_client(frames)
            if isinstance(header, Hello):
                self.socket.send_multipart([self._client, *pack(WELCOME)])
            elif isinstance(header, Submission):
                self._asked.append((header, columns))

    def answer(self) -> None:
        asked, self._asked = self._asked, []
        for header, columns in asked:
            fields = msgspec.msgpack.decode(header.fields)
            count, samples = int(fields["max_tokens"]), int(fields.get("n", 1))
            size = columns["ids"].size * samples
            rows: Columns = {
                "ids": np.repeat(columns["ids"], samples),
                "samples": np.tile(np.arange(samples, dtype=np.int32), columns["ids"].size),
                "counts": np.full(size, count, np.int32),
                "reasons": np.full(size, 2, np.int32),
                "cached": np.zeros(size, np.int32),
                "token_ids": np.repeat(columns["seeds"].astype(np.int32), samples * count),
            }
            self._seq += 1
            self.socket.send_multipart([self._client, *pack(Results(seq=self._seq, columns=tuple(rows)), rows)])

    def close(self) -> None:
        self._poller.unregister(self.socket)
        self.socket.close(linger=0)


def main() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 1 << 14)
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    replicas = [FakeReplica(context, poller) for _ in range(int(sys.argv[1]))]
    for replica in replicas:
        print(replica.url, flush=True)
    due = time.monotonic()
    while True:
        heard = dict(poller.poll(max(0, int(1000 * (due - time.monotonic())))))
        for replica in replicas:
            if replica.socket in heard:
                replica.hear()
        if time.monotonic() >= due:
            due = time.monotonic() + TICK
            for replica in replicas:
                replica.answer()
        if sys.stdin.fileno() in heard:
            line = sys.stdin.readline()
            if not line:
                return
            replicas[int(line)].close()
            replicas[int(line)] = FakeReplica(context, poller)
            print(replicas[int(line)].url, flush=True)


@dataclass
class FakeFleet:
    """The process. urls: of the replicas that live."""

    process: Process
    urls: list[str]

    async def replace(self, number: int) -> None:
        """End a replica, and begin another one in its place."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % number)
        self.urls = [*self.urls[:number], await self.read_line(), *self.urls[number + 1 :]]

    async def read_line(self) -> str:
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()


@asynccontextmanager
async def fake_fleet(count: int) -> AsyncIterator[FakeFleet]:
    command = [sys.executable, "-m", "tests.processes.fake_replicas", str(count)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    fleet = FakeFleet(process, [])
    try:
        fleet.urls = [await fleet.read_line() for _ in range(count)]
        yield fleet
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


if __name__ == "__main__":
    main()
