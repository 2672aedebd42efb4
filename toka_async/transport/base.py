"""The interfaces of inboxes and outboxes, whatever carries the messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Outbox(Protocol[T_contra]):
    """Sends messages of one channel to one inbox, in order; never blocks and never drops."""

    def send(self, message: T_contra) -> None: ...

    def close(self) -> None: ...


class BatchOutbox(Outbox[T_contra], Protocol[T_contra]):
    """An outbox that also sends several messages at once, for which the receiver wakes up once."""

    def send_all(self, messages: Sequence[T_contra]) -> None: ...


class EveryOutbox(Generic[T]):
    def __init__(self, outboxes: Sequence[Outbox[T]]) -> None:
        self._outboxes = outboxes

    def send(self, message: T) -> None:
        for outbox in self._outboxes:
            outbox.send(message)

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.close()


class Inbox(Protocol[T]):
    """Receives messages of one channel from any number of outboxes."""

    def drain(self) -> list[T]:
        """Take all messages that have arrived, without waiting."""
        ...

    def close(self) -> None: ...
