"""An inbox and outbox in one: a list within the process, for tests. Messages still pass through the codec."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from toka_async.transport.codec import Codec

T = TypeVar("T")


class LocalChannel(Generic[T]):
    def __init__(self, codec: Codec[T]) -> None:
        self._codec = codec
        self._queue: deque[bytes] = deque()

    def send(self, message: T) -> None:
        self._queue.append(self._codec.encode(message))

    def send_all(self, messages: Sequence[T]) -> None:
        for message in messages:
            self.send(message)

    def drain(self) -> list[T]:
        messages = [self._codec.decode(data) for data in self._queue]
        self._queue.clear()
        return messages

    def close(self) -> None:
        self._queue.clear()
