"""Sends a load of completion requests from its own process: `python -m toka_async.bench.load`.

Reads a LoadShape as JSON on standard input, prints a LoadResult as JSON. While the clock runs, it only counts bytes and
events, and decodes events as they arrive; it decodes and checks whole answers afterwards.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass, field

import aiohttp
import msgspec
import uvloop

from toka_async.bench.loads.served import BenchError
from toka_async.listening import raise_limits

DONE = b"[DONE]"


class LoadShape(msgspec.Struct, frozen=True, kw_only=True):
    """`connections` clients, each of which sends `waves` requests, one after the other."""

    url: str
    model: str
    connections: int
    waves: int
    samples: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int
    stream: bool
    stop: list[str] = []
    logprobs: int | None = None


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result from the first send to the last byte. error: what was wrong with an answer, or empty."""

    seconds: float
    num_tokens: int
    num_bytes: int
    num_chars: int
    num_stopped: int
    num_cut: int
    cpu_seconds: float
    error: str = ""


class LoadChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: str | None


class LoadUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class LoadReply(msgspec.Struct, frozen=True):
    choices: list[LoadChoice]
    usage: LoadUsage | None = None


DECODER = msgspec.json.Decoder(LoadReply)


@dataclass(slots=True)
class Tally:
    num_bytes: int = 0
    finished: dict[int, str] = field(default_factory=dict)  # finish reason by sample
    num_chars: dict[int, int] = field(default_factory=dict)  # characters by sample
    usage: LoadUsage | None = None
    done: bool = False
    body: bytes = b""

    def add(self, answer: LoadReply) -> None:
        for choice in answer.choices:
            self.num_chars[choice.index] = self.num_chars.get(choice.index, 0) + len(choice.text)
            if choice.finish_reason is not None:
                if choice.index in self.finished:
                    raise BenchError(f"sample {choice.index} finished twice")
                self.finished[choice.index] = choice.finish_reason
        self.usage = answer.usage or self.usage

    def check(self, load: LoadShape) -> None:
        """Raises BenchError unless every sample is there, with text, and all tokens are accounted for."""
        if not self.done:
            raise BenchError("an answer broke off")
        if self.finished.keys() != set(range(load.samples)):
            raise BenchError(f"{len(self.finished)} samples of {load.samples} finished")
        if not set(self.finished.values()) <= {"stop", "length"}:
            raise BenchError(f"unknown finish reasons: {sorted(set(self.finished.values()))}")
        if self.usage is None or self.usage.prompt_tokens != load.prompt_tokens:
            raise BenchError(f"wrong usage: {self.usage}")
        num_cut = self.num_cut
        least, most = num_cut * load.output_tokens + load.samples - num_cut, load.samples * load.output_tokens
        if not least <= self.usage.completion_tokens <= most:
            raise BenchError(f"{self.usage.completion_tokens} tokens: expected {least} to {most}")
        silent = sum(self.finished[i] == "length" and not self.num_chars.get(i) for i in self.finished)
        if silent and load.output_tokens > 8:  # a few tokens may have no text
            raise BenchError(f"{silent} samples have no text")

    @property
    def num_cut(self) -> int:
        return sum(reason == "length" for reason in self.finished.values())


async def send(session: aiohttp.ClientSession, load: LoadShape, body: bytes) -> Tally:
    """Sends one request and reads its answer. Raises BenchError when it is refused."""
    tally = Tally()
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{load.url}/v1/completions", data=body, headers=headers) as response:
        if response.status != 200:
            raise BenchError(f"status {response.status}: {(await response.text())[:300]}")
        if load.stream:
            await read_events(response, tally)
        else:
            tally.body = await response.read()
            tally.num_bytes, tally.done = len(tally.body), True
    return tally


async def read_events(response: aiohttp.ClientResponse, tally: Tally) -> None:
    rest = b""
    async for data in response.content.iter_any():
        tally.num_bytes += len(data)
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event[6:] == DONE:
                tally.done = True
            else:
                tally.add(DECODER.decode(event[6:]))


def request_body(load: LoadShape, number: int) -> bytes:
    """Builds a request with a unique prompt: ids of a linear congruential generator (Knuth's MMIX), never 0."""
    state, ids = number + 1, []
    for _ in range(load.prompt_tokens):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        ids.append(1 + (state >> 33) % (load.vocab_size - 1))
    body: dict[str, object] = {
        "model": load.model,
        "prompt": ids,
        "n": load.samples,
        "max_tokens": load.output_tokens,
        "seed": number,
        "stream": load.stream,
    }
    if load.stop:
        body["stop"] = load.stop
    if load.logprobs is not None:
        body["logprobs"] = load.logprobs
    return msgspec.json.encode(body | ({"stream_options": {"include_usage": True}} if load.stream else {}))


async def run(load: LoadShape) -> LoadResult:
    """Sends the load. Raises BenchError when an answer is wrong."""
    bodies = [
        [request_body(load, wave * load.connections + connection) for wave in range(load.waves)]
        for connection in range(load.connections)
    ]
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:

        async def client(mine: list[bytes]) -> list[Tally]:
            return [await send(session, load, body) for body in mine]

        cpu, began = time.process_time(), time.perf_counter()
        tallies = [tally for mine in await asyncio.gather(*map(client, bodies)) for tally in mine]
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return add_up(load, tallies, seconds, cpu)


def add_up(load: LoadShape, tallies: list[Tally], seconds: float, cpu: float) -> LoadResult:
    """Adds up the answers once they are decoded and checked."""
    num_tokens = 0
    for tally in tallies:
        if not load.stream:
            tally.add(DECODER.decode(tally.body))
        tally.check(load)
        assert tally.usage is not None
        num_tokens += tally.usage.completion_tokens
    num_cut = sum(tally.num_cut for tally in tallies)
    return LoadResult(
        seconds=seconds,
        num_tokens=num_tokens,
        num_bytes=sum(tally.num_bytes for tally in tallies),
        num_chars=sum(sum(tally.num_chars.values()) for tally in tallies),
        num_stopped=len(tallies) * load.samples - num_cut,
        num_cut=num_cut,
        cpu_seconds=cpu,
    )


def run_apart(load: LoadShape) -> LoadResult:
    """Sends the load from another process. Raises BenchError when it fails or an answer is wrong."""
    command = [sys.executable, "-m", "toka_async.bench.load"]
    done = subprocess.run(command, input=msgspec.json.encode(load), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise BenchError(f"the client ended with code {done.returncode}")
    result = msgspec.json.decode(done.stdout, type=LoadResult)
    if result.error:
        raise BenchError(result.error)
    return result


def main() -> None:
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadShape)
    raise_limits()
    try:
        result = uvloop.run(run(load))
    except (BenchError, aiohttp.ClientError) as error:
        nothing = dict.fromkeys(("num_tokens", "num_bytes", "num_chars", "num_stopped", "num_cut"), 0)
        result = LoadResult(**nothing, seconds=0.0, cpu_seconds=0.0, error=str(error) or type(error).__name__)
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
