"""What log-probs of the chosen tokens cost: tokens a second over HTTP and over ZeroMQ, with them and without.

    python scripts/rl/measure_logprobs.py /models/8b model.load=random --prompts 16 --samples 256
    python scripts/rl/measure_logprobs.py demo --prompts 4 --samples 16 --tokens 64 model.device=cpu

Starts one server. All kinds of requests take turns on it, forwards and backwards; the figures are medians. Each
request asks for many samples of one length, and its prompt is in no cache. The clock stops at the last byte; answers
over HTTP are decoded and checked after that.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import socket
import statistics
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop

from toka_async.bench.loads.served import Served, serve
from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.spec import read_spec
from toka_async.client import Client, Fields

HTTP_KINDS: dict[str, dict[str, Any]] = {
    "HTTP": {},
    "HTTP, JSON": {"logprobs": 0},
    "HTTP, packed": {"logprobs": 0, "packed_logprobs": True},
}
ZMQ_KINDS: dict[str, Fields] = {"ZeroMQ": {}, "ZeroMQ, columns": {"logprobs": 0}}


@dataclass(slots=True)
class Runs:
    """What one kind of request took. rates: tokens a second. cpu: the server's microseconds of each token."""

    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    bytes_per_token: float = 0.0

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


class Load:
    def __init__(self, args: argparse.Namespace, model: Path, url: str, zmq: Client) -> None:
        self._args = args
        self._vocab_size = read_spec(model).vocab_size
        self._numbers = count()
        self._zmq = zmq
        self._url = url
        self._num_tokens = args.prompts * args.samples * args.tokens

    def _make_prompts(self) -> list[list[int]]:
        args = self._args
        drawn = (np.random.default_rng(next(self._numbers)) for _ in range(args.prompts))
        return [each.integers(1, self._vocab_size, args.prompt_tokens).tolist() for each in drawn]

    async def run_http(self, session: aiohttp.ClientSession, kind: str) -> tuple[float, float]:
        """Returns seconds, and bytes of an answer for each token."""
        args, asked = self._args, HTTP_KINDS[kind]
        common = {"max_tokens": args.tokens, "n": args.samples, "ignore_eos": True, "logprobs_mode": args.mode}
        bodies = [msgspec.json.encode({"prompt": prompt} | common | asked) for prompt in self._make_prompts()]

        async def post(body: bytes) -> bytes:
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{self._url}/v1/completions", data=body, headers=headers) as response:
                answer = await response.read()
                assert response.status == 200, answer[:500]
                return answer

        began = time.perf_counter()
        answers = await asyncio.gather(*map(post, bodies))
        seconds = time.perf_counter() - began
        for answer in answers:
            self._check_http(msgspec.json.decode(answer), asked)
        return seconds, sum(map(len, answers)) / self._num_tokens

    def _check_http(self, answer: dict[str, Any], asked: dict[str, Any]) -> None:
        args = self._args
        assert len(answer["choices"]) == args.samples
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "length", choice["finish_reason"]
            if "packed_logprobs" in asked:
                values = np.frombuffer(base64.b64decode(choice["packed_logprobs"]["logprobs"]), "<f4")
            elif asked:
                values = np.array(choice["logprobs"]["token_logprobs"])
            else:
                assert choice["logprobs"] is None
                continue
            assert values.size == args.tokens
            assert (values <= 0).all()
            assert (values > -1000).all()

    async def run_zmq(self, kind: str) -> float:
        """Returns seconds."""
        args = self._args
        fields = Fields(max_tokens=args.tokens, n=args.samples, ignore_eos=True, text=False, logprobs_mode=args.mode)
        prompts = self._make_prompts()
        began = time.perf_counter()
        results = await self._zmq.generate_many(prompts, **fields | ZMQ_KINDS[kind])
        seconds = time.perf_counter() - began
        samples = [sample for result in results for sample in result.samples]
        assert len(samples) == args.prompts * args.samples
        for sample in samples:
            assert sample.token_ids.size == args.tokens
            assert sample.logprobs.size == (args.tokens if ZMQ_KINDS[kind] else 0)
            assert (sample.logprobs <= 0).all()
        return seconds

    async def run(self, session: aiohttp.ClientSession, server: Served, kind: str, runs: Runs) -> None:
        before = sum(server.cpu_seconds().values())
        if kind in HTTP_KINDS:
            seconds, runs.bytes_per_token = await self.run_http(session, kind)
        else:
            seconds = await self.run_zmq(kind)
        runs.rates.append(self._num_tokens / seconds)
        runs.cpu.append((sum(server.cpu_seconds().values()) - before) / self._num_tokens * 1e6)


async def measure(args: argparse.Namespace, server: Served, model: Path, address: str) -> dict[str, Runs]:
    runs = {kind: Runs() for kind in [*HTTP_KINDS, *ZMQ_KINDS]}
    kinds = list(runs)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with (
        Client(address) as client,
        aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session,
    ):
        load = Load(args, model, server.url, client)
        for kind in kinds:  # warm
            await load.run(session, server, kind, Runs())
        for turn in range(args.turns):
            for kind in kinds[::-1] if turn % 2 else kinds:
                await load.run(session, server, kind, runs[kind])
                print(f"turn {turn + 1}: {kind}: {runs[kind].rates[-1]:,.0f} tokens/s", flush=True)
    return runs


def report(runs: dict[str, Runs]) -> None:
    for kinds in (list(HTTP_KINDS), list(ZMQ_KINDS)):
        plain = runs[kinds[0]]
        for kind in kinds:
            each = runs[kind]
            parts = [f"{kind}: {each.rate:,.0f} tokens/s", f"server's CPU {statistics.median(each.cpu):.2f} us a token"]
            if each.bytes_per_token:
                parts.append(f"{each.bytes_per_token:.1f} bytes a token")
            if each is not plain:
                parts.append(f"cost {100 * (1 - each.rate / plain.rate):.1f} %")
            low, high = min(each.rates), max(each.rates)
            print("; ".join([*parts, f"all {low:,.0f} to {high:,.0f}"]))


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, or demo")
    parser.add_argument("--prompts", type=int, default=16, help="requests at once")
    parser.add_argument("--samples", type=int, default=256, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each sample")
    parser.add_argument("--mode", default="raw", choices=["raw", "temperature", "processed"])
    parser.add_argument("--turns", type=int, default=5)
    args, overrides = parser.parse_known_args()
    model, address = resolve_model(args.model), f"tcp://127.0.0.1:{find_port()}"
    own = [f"model.path={model}", f"zmq.bind={address}", "log.stats_interval=0"]
    with serve([*own, *overrides]) as server:
        report(uvloop.run(measure(args, server, model, address)))


if __name__ == "__main__":
    main()
