"""A client of direct submission that sends anything, over a socket of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import zmq

from tests.cases.wire import Frames
from tests.cases.wire_messages import frames_of
from toka_async.protocol import VERSIONS, Bye, Error, Hello, Submission, from_server

TIMEOUT = 10_000  # milliseconds
MARK = 10**12  # the first id of requests that are refused, whose refusals tell that all before them was dealt with


class Garbage:
    """A connection. num_messages: sent. num_answers: received."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._mark = MARK
        self.num_messages = 0
        self.num_answers = 0

    def send(self, messages: list[Frames]) -> None:
        """Sends them in a session, and fails unless every answer is one of the protocol, and the endpoint lives."""
        self._say(frames_of(Hello(versions=VERSIONS, session=b"0123456789abcdef")))
        for frames in messages:
            self._say(frames)
        self._say(frames_of(Bye()))
        self._say(frames_of(Hello(versions=VERSIONS, session=b"fedcba9876543210")))
        self._mark += 1
        marks = {"ids": np.asarray([self._mark])}  # and no lengths
        self._say(frames_of(Submission(columns=("ids",)), marks))
        while self._next() != [self._mark]:
            pass
        self._say(frames_of(Bye()))

    def _say(self, frames: Frames) -> None:
        if frames:
            self._socket.send_multipart(frames)
            self.num_messages += 1

    def _next(self) -> list[int]:
        """The requests that the next message refuses."""
        assert self._socket.poll(TIMEOUT), "the endpoint does not answer"
        header, columns = from_server(self._socket.recv_multipart())
        self.num_answers += 1
        if not isinstance(header, Error):
            return []
        assert header.status != 500, header
        return columns["ids"].tolist() if "ids" in columns else []


@contextmanager
def garbage(url: str) -> Iterator[Garbage]:
    """To the endpoint there."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(url)
            yield Garbage(socket)
    finally:
        context.term()
