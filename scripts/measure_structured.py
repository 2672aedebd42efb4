"""Tokens a second of requests whose outputs follow a schema, beside the same requests without one.

    python scripts/measure_structured.py URL samples --prompts 16 --samples 512
    python scripts/measure_structured.py URL users --users 64
    python scripts/measure_structured.py URL first

The schema has no end that a sample could come to, so that both kinds have as many tokens. `users` stream, one request
after the other. `first` sends prompts of one token each with a schema that the server has not seen: what the first
token waits for it. The two kinds take turns; the figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from itertools import count
from typing import Any

import aiohttp

ROUNDS = 3
NUM_FIRST = 20
TIMEOUT = aiohttp.ClientTimeout(total=600)


def make_schema(number: int = 0) -> dict[str, Any]:
    """Makes a schema of a list of orders. number: in the name of a field, so that schemas differ."""
    text = {"type": "string", "minLength": 1, "maxLength": 40}
    order = {
        "id": {"type": "integer", "minimum": 0},
        "status": {"enum": ["new", "paid", "sent", "returned"]},
        "customer": {
            "type": "object",
            "properties": {
                "name": text,
                "email": {**text, "pattern": "^[a-z]+@[a-z]+\\.com$"},
                "vip": {"type": "boolean"},
            },
            "required": ["name", "email", "vip"],
            "additionalProperties": False,
        },
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": 5,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                    "price": {"type": "number"},
                },
                "required": ["sku", "price"],
                "additionalProperties": False,
            },
        },
        f"note_{number}": text,
    }
    required = list(order)
    return {
        "type": "array",
        "minItems": 100_000,
        "items": {"type": "object", "properties": order, "required": required, "additionalProperties": False},
    }


def make_body(model: str, num_tokens: int, schema: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "max_tokens": num_tokens, "temperature": 0.6, **fields}
    if schema is None:
        return {**body, "ignore_eos": True}
    wish = {"type": "json_schema", "json_schema": {"name": "orders", "schema": schema, "strict": True}}
    return {**body, "response_format": wish}


class Load:
    def __init__(self, session: aiohttp.ClientSession, args: argparse.Namespace, model: str) -> None:
        self._session = session
        self._args = args
        self._model = model
        self._prompts = count()

    def make_prompt(self) -> str:
        """Makes a prompt that no cache has."""
        return f"Order {next(self._prompts)}: " + "list all orders of the day as JSON. " * 20

    async def post(self, body: dict[str, Any]) -> int:
        """Returns the number of tokens."""
        async with self._session.post("/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            assert all(choice["finish_reason"] == "length" for choice in answer["choices"]), answer
            tokens: int = answer["usage"]["completion_tokens"]
            return tokens

    async def time_stream(self, body: dict[str, Any]) -> tuple[float, int]:
        """Returns seconds to the first token, and the number of tokens."""
        began, first, tokens = time.perf_counter(), 0.0, 0
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._session.post("/v1/completions", json=asked) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - began
                    event = json.loads(line[6:])
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return first, tokens

    async def run_samples(self, schema: dict[str, Any] | None) -> float:
        args, began = self._args, time.perf_counter()
        bodies = [
            make_body(self._model, args.tokens, schema, n=args.samples, prompt=self.make_prompt())
            for _ in range(args.prompts)
        ]
        tokens = sum(await asyncio.gather(*map(self.post, bodies)))
        return tokens / (time.perf_counter() - began)

    async def run_users(self, schema: dict[str, Any] | None) -> float:
        args, began = self._args, time.perf_counter()

        async def use() -> int:
            total = 0
            for _ in range(args.requests):
                body = make_body(self._model, args.tokens, schema, prompt=self.make_prompt())
                total += (await self.time_stream(body))[1]
            return total

        tokens = sum(await asyncio.gather(*(use() for _ in range(args.users))))
        return tokens / (time.perf_counter() - began)


async def measure(args: argparse.Namespace) -> None:
    async with aiohttp.ClientSession(args.url, timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get("/v1/models") as response:
            model: str = (await response.json())["data"][0]["id"]
        load = Load(session, args, model)
        if args.what == "first":
            await measure_first(load, model)
            return
        run = load.run_samples if args.what == "samples" else load.run_users
        kinds: dict[str, dict[str, Any] | None] = {"plain": None, "schema": make_schema()}
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(1 + ROUNDS):
            for kind, schema in kinds.items():
                rate = await run(schema)
                if turn:
                    rates[kind].append(rate)
        plain, constrained = (statistics.median(rates[kind]) for kind in kinds)
        spread = "; ".join(f"{kind} {', '.join(f'{rate:.0f}' for rate in each)}" for kind, each in rates.items())
        print(
            f"{args.what}: plain {plain:.0f}, schema {constrained:.0f} tokens/s: {constrained / plain:.3f} ({spread})"
        )


async def measure_first(load: Load, model: str) -> None:
    times: dict[str, list[float]] = {"plain": [], "known": [], "new": []}
    for number in range(1, NUM_FIRST + 1):
        schemas = {"plain": None, "known": make_schema(), "new": make_schema(number)}
        for kind, schema in schemas.items():
            body = make_body(model, 4, schema, prompt=load.make_prompt())
            times[kind].append((await load.time_stream(body))[0])
    medians = {kind: 1000 * statistics.median(each[1:]) for kind, each in times.items()}
    print("first tokens, ms: " + ", ".join(f"{kind} {each:.1f}" for kind, each in medians.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("what", choices=["samples", "users", "first"])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=500, help="of each prompt")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2, help="of each user")
    parser.add_argument("--tokens", type=int, default=128, help="of each sample")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
