from __future__ import annotations

import asyncio
from unittest.mock import Mock

from aiohttp.http_writer import StreamWriter
from aiohttp.test_utils import make_mocked_request

from toka_async.server.http.respond import EventResponse


async def test_the_header_goes_out_with_the_first_event() -> None:
    protocol = Mock()
    protocol.transport.is_closing.return_value = False
    writer = StreamWriter(protocol, asyncio.get_running_loop())
    response = EventResponse(headers={"Content-Type": "text/event-stream"})

    await response.prepare(make_mocked_request("POST", "/", writer=writer))
    assert not protocol.transport.write.mock_calls
    await response.write(b"data: {}\n\n")

    (call,) = protocol.transport.write.mock_calls
    (written,) = call.args
    assert written.startswith(b"HTTP/1.1 200 OK\r\n")
    assert written.endswith(b"\r\n\r\na\r\ndata: {}\n\n\r\n")
