"""Whatever a server sends to the client: a message of the protocol, or a ProtocolError and nothing else."""

from __future__ import annotations

from hypothesis import given, settings

from tests.cases.wire import Frames
from tests.cases.wire_messages import HEARD, Client


@settings(deadline=None, max_examples=100)
@given(messages=HEARD)
def test_anything_is_a_message_or_a_protocol_error(messages: list[Frames]) -> None:
    Client().hear(messages)
