"""Messages to bytes and back: one msgpack encoder, one typed decoder per channel.

Decoded columns are memoryviews into the received buffer: nothing is copied. Knows no sockets.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Codec(Generic[T]):
    """Encodes and decodes the messages of one channel, a union such as `messages.ToServer`."""

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def encode(self, message: T) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> T:
        """Raises msgspec.ValidationError for anything that is not a message of this channel."""
        return self._decoder.decode(data)
