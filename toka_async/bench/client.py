"""A client of any OpenAI-compatible server: sends completion requests at once and times their answers.

While the clock runs, it only keeps bodies as bytes and counts events by time; it decodes them afterwards, so a client
on the server's machine takes little of it. Knows no loads.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from toka_async.bench.loads.served import BenchError
from toka_async.bench.loads.workloads import Body

HEADERS = {"Content-Type": "application/json"}


class ReplyUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class ReplyChoice(msgspec.Struct, frozen=True):
    index: int
    finish_reason: str | None = None


class WireAnswer(msgspec.Struct, frozen=True):
    """A response, or an event of a streamed one, with the fields that are counted."""

    choices: list[ReplyChoice] = []
    usage: ReplyUsage | None = None
    error: object = None


class ListedModel(msgspec.Struct, frozen=True):
    id: str
    vocab_size: int | None = None


class ServedModels(msgspec.Struct, frozen=True):
    data: list[ListedModel]


DECODER = msgspec.json.Decoder(WireAnswer)


@dataclass(slots=True)
class Reply:
    """How one request went. Times are seconds since it was sent; `first` and `last` are those of streamed text.

    ended_at: seconds from the load's begin to the end. error: what went wrong, or empty. has_ended: False for a request
    that was abandoned.
    """

    n: int
    seconds: float = 0.0
    ended_at: float = 0.0
    first: float | None = None
    last: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    has_ended: bool = False
    bodies: list[bytes] = field(default_factory=list)

    def decode(self) -> None:
        """Reads the counts out of the bodies; a wrong body becomes the error."""
        ended: set[int] = set()
        try:
            for body in self.bodies:
                answer = DECODER.decode(body)
                if answer.error:
                    raise BenchError(f"an error instead of an answer: {str(answer.error)[:200]}")
                ended |= {choice.index for choice in answer.choices if choice.finish_reason is not None}
                if answer.usage is not None:
                    self.prompt_tokens = answer.usage.prompt_tokens
                    self.output_tokens = answer.usage.completion_tokens
        except (BenchError, msgspec.DecodeError) as error:
            self.error = str(error)
        else:
            if len(ended) != self.n:
                self.error = f"{len(ended)} of {self.n} choices ended"
            elif not self.output_tokens:
                self.error = "the answer has no usage"
        self.bodies.clear()


def open_session() -> aiohttp.ClientSession:
    """Opens a session without a limit of connections, with the API key of TOKA_API_KEY, if it is set."""
    key = os.environ.get("TOKA_API_KEY", "")
    headers = {"Authorization": f"Bearer {key}"} if key else None
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20, headers=headers)


async def fetch_served_models(session: aiohttp.ClientSession, url: str) -> list[ListedModel]:
    """Returns the models of /v1/models, at least one. Raises BenchError when no such server answers."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            models = msgspec.json.decode(await response.read(), type=ServedModels).data
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise BenchError(f"no OpenAI-compatible server at {url}: {error or type(error).__name__}") from None
    if not models:
        raise BenchError(f"{url} serves no model")
    return models


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of sending a load: seconds from the first byte to the last, and the replies in order.

    is_interrupted: Ctrl-C ended it; the replies are those of requests that had ended.
    """

    seconds: float
    replies: list[Reply]
    is_interrupted: bool


async def send_all(
    session: aiohttp.ClientSession,
    url: str,
    asked: Sequence[Body],
    concurrency: int,
    on_end: Callable[[], None] = lambda: None,
) -> Sent:
    """Sends the requests, `concurrency` at once; calls `on_end` as each ends."""
    encoded = [msgspec.json.encode(body) for body in asked]
    replies = [Reply(body["n"]) for body in asked]
    slots = asyncio.Semaphore(concurrency)

    async def send(number: int) -> None:
        async with slots:
            await exchange(session, url, encoded[number], bool(asked[number].get("stream")), replies[number])
            replies[number].ended_at = time.perf_counter() - began
            on_end()

    began, is_interrupted = time.perf_counter(), False
    try:
        await asyncio.gather(*map(send, range(len(asked))))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()  # the caller reports what was measured
        is_interrupted = True
    seconds = time.perf_counter() - began
    replies = [reply for reply in replies if reply.has_ended]
    for reply in replies:
        if not reply.error:
            reply.decode()
    return Sent(seconds, replies, is_interrupted)


async def exchange(session: aiohttp.ClientSession, url: str, body: bytes, stream: bool, reply: Reply) -> None:
    """Sends one request and reads its answer; a failure becomes the reply's error."""
    began = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", data=body, headers=HEADERS) as response:
            if response.status != 200:
                reply.error = f"status {response.status}: {(await response.text())[:300]}"
            elif stream:
                await read_events(response, reply, began)
            else:
                reply.bodies.append(await response.read())
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        reply.error = str(error) or type(error).__name__
    reply.seconds = time.perf_counter() - began
    reply.has_ended = True


async def read_events(response: aiohttp.ClientResponse, reply: Reply, began: float) -> None:
    """Reads server-sent events, without their prefix, and the times of the first and last with a choice."""
    rest, done = b"", False
    async for data in response.content.iter_any():
        *events, rest = (rest + data).split(b"\n\n")
        now = time.perf_counter() - began
        for event in events:
            text = event.strip().removeprefix(b"data:").strip()
            if text == b"[DONE]":
                done = True
            elif text.startswith(b"{"):
                reply.bodies.append(text)
                if b'"choices":[]' not in text:
                    reply.first, reply.last = now if reply.first is None else reply.first, now
    if not done:
        reply.error = "the stream broke off"
