from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from unittest.mock import Mock

import numpy as np
import pytest
from aiohttp.http_writer import StreamWriter
from aiohttp.test_utils import make_mocked_request

from tests.cases.requests import make_block
from toka_async.messages import Reason
from toka_async.openai.errors import ErrorResponse
from toka_async.server.engine.request_group import RequestFailedError, RequestGroup
from toka_async.server.engine.token_block import Score, TokenBlock
from toka_async.server.generate.service import Run
from toka_async.server.http.respond import EventResponse, EventStream
from toka_async.server.http.rounds import MOST_SECONDS, Rounds


class Client:
    """A connection, which says what was written."""

    def __init__(self) -> None:
        self.protocol = Mock(writing_paused=False, _paused=False)  # aiohttp looks at both
        self.protocol.transport.is_closing.return_value = False
        self.writer = StreamWriter(self.protocol, asyncio.get_running_loop())
        transport = self.protocol.transport
        self.request = make_mocked_request("POST", "/", writer=self.writer, protocol=self.protocol, transport=transport)

    def take(self) -> list[bytes]:
        """The chunks that were written since, without headers."""
        calls = self.protocol.transport.write.mock_calls
        written = [bytes(call.args[0]).rpartition(b"\r\n\r\n")[2] or bytes(call.args[0]) for call in calls]
        self.protocol.transport.write.reset_mock()
        return [chunk.split(b"\r\n")[1] for chunk in written]


@dataclass
class Events:
    """Each token's id is an event; what came in columns and what in lists is told apart."""

    takes_lists: bool = True
    num_open: int = 1
    is_broken: bool = False
    most_tokens: int = 99
    taken: list[list[int]] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    def take(self, block: TokenBlock) -> bytes:
        self.num_open -= int(block.reasons.any())
        return b"columns %a" % block.tokens.token_ids.tolist()

    def take_lists(self, token_ids: list[int], scores: list[Score]) -> bytes:
        if self.is_broken:
            raise ValueError("no text")
        self.taken.append(token_ids)
        self.scores += scores
        return b"ids %a" % token_ids

    def finish(self) -> bytes:
        return b"end"

    def fail(self, error: ErrorResponse) -> bytes:
        return error.error.message.encode()


class Stream:
    """A stream whose first token was sent."""

    def __init__(self, client: Client, events: Events) -> None:
        self.client = client
        self.group = RequestGroup(1, 1, stream=True)
        run = Mock(spec=Run, group=self.group)
        self.sending = asyncio.create_task(EventStream(client.request, run, events, Rounds()).send())

    async def begin(self) -> None:
        self.bring(1)
        await turn()
        assert self.client.take() == [b"columns [1]"]

    def bring(self, *ids: int, reason: Reason = Reason.NONE) -> None:
        """Tokens come, as the engine gives them out."""
        if reason or not self.group.offer([*ids], [(-float(each), [each], [-1.0]) for each in ids]):
            self.group.on_tokens(make_block([(0, [*ids], reason)]))


async def turn() -> None:
    """Time for woken tasks and the next round."""
    await asyncio.sleep(2 * MOST_SECONDS)


@pytest.fixture
async def client() -> Client:
    return Client()


async def test_tokens_of_a_round_go_out_together_and_before_the_end(client: Client) -> None:
    stream = Stream(client, events := Events())
    await stream.begin()
    stream.bring(2)
    stream.bring(3, 4)
    assert client.take() == []
    await turn()
    assert client.take() == [b"ids [2, 3, 4]"]
    stream.bring(5)
    stream.bring(6, reason=Reason.LENGTH)
    await stream.sending
    assert client.take()[:3] == [b"ids [5]", b"columns [6]", b"end"]
    assert events.taken == [[2, 3, 4], [5]]
    assert [logprob for logprob, _, _ in events.scores] == [-2, -3, -4, -5]


async def test_a_client_that_does_not_read_gets_columns_once_it_reads(client: Client) -> None:
    stream = Stream(client, Events())
    await stream.begin()
    client.protocol.writing_paused = True
    stream.bring(2)
    client.protocol.writing_paused = False
    stream.bring(3)  # after what waits
    await turn()
    assert client.take() == [b"columns [2, 3]"]
    stream.bring(4)
    await turn()
    assert client.take() == [b"ids [4]"]
    stream.sending.cancel()


async def test_tokens_before_an_error_are_sent(client: Client) -> None:
    stream = Stream(client, Events())
    await stream.begin()
    stream.bring(2)
    stream.group.on_failed(np.zeros(1, np.int64), RequestFailedError("too slow"))
    await stream.sending
    assert client.take()[:2] == [b"ids [2]", b"too slow"]


async def test_a_client_that_leaves_ends_its_stream(client: Client) -> None:
    """Its connection closes at once, but is lost only when what was written is sent."""
    stream = Stream(client, Events())
    await stream.begin()
    stream.bring(2)
    client.protocol.transport.is_closing.return_value = True
    await turn()
    assert client.take() == []
    stream.bring(3)
    with pytest.raises(ConnectionResetError):
        await stream.sending
    assert stream.group.receive is None


async def test_events_that_cannot_be_made_end_the_connection(client: Client) -> None:
    stream = Stream(client, events := Events())
    await stream.begin()
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    events.is_broken = True
    stream.bring(2)
    await turn()
    client.protocol.transport.abort.assert_called_once_with()
    assert isinstance(reported[0]["exception"], ValueError)
    stream.sending.cancel()


async def test_other_events_are_made_of_columns(client: Client) -> None:
    stream = Stream(client, Events(takes_lists=False))
    await stream.begin()
    stream.bring(2)
    await turn()
    assert client.take() == [b"columns [2]"]
    stream.sending.cancel()


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
