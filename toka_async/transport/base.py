"""What an inbox and an outbox are, whatever carries the messages."""

from __future__ import annotations

from typing import Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Outbox(Protocol[T_contra]):
    """Sends messages of one channel to one inbox, in order; never blocks and never drops."""

    def send(self, message: T_contra) -> None: ...

    def close(self) -> None: ...


class Inbox(Protocol[T]):
    """Receives messages of one channel from any number of outboxes."""

    def drain(self) -> list[T]:
        """All messages that have arrived, without waiting."""
        ...

    def close(self) -> None: ...
