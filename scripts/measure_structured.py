"""Tokens a second of requests whose outputs follow a schema, beside the same requests without one.

    python scripts/measure_structured.py URL samples --prompts 16 --samples 512
    python scripts/measure_structured.py URL users --users 64
    python scripts/measure_structured.py URL samples --kinds plain
    python scripts/measure_structured.py URL first

The schema has no end that a sample could come to, so that both kinds have as many tokens. `half` gives it to every
second request. `users` stream, one request after the other. `first` sends prompts of a few tokens each with a schema
that the server has not seen: what the first token waits for it. The kinds take turns; the figures are medians.

A model of random weights would write every string to its `maxLength`. With `--ends` its tokens that end a string get a
bias, so that strings have a few tokens, as those of a trained model. Plain requests get the opposite bias: with the
same one their rows would all draw these four tokens, and products of rows that are alike take a GPU less power and so
less time. `alike` is that load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import time
from itertools import count
from typing import Any

import aiohttp

NUM_FIRST = 20
ENDS = ('"', '",', '":', '"}')
METRICS = ("toka:grammar_tokens_total", "toka:mask_seconds_total", "toka:mask_stall_seconds_total")
TIMEOUT = aiohttp.ClientTimeout(total=600)


def close_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def make_schema(name: str = "note") -> dict[str, Any]:
    """Makes a schema of a list of orders, of the size and with the kinds of types that callers have.

    name: of a field, so that schemas differ. Numbers are bounded, as a model of random weights would not end one.
    """
    text = {"type": "string", "minLength": 1, "maxLength": 40}
    cents = {"type": "integer", "minimum": 0, "maximum": 1_000_000}
    address = {
        "street": text,
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "country": {"enum": ["DE", "FR", "IT", "JP", "US"]},
    }
    customer = {
        "id": {"type": "string", "format": "uuid"},
        "name": text,
        "email": {"type": "string", "format": "email"},
        "vip": {"type": "boolean"},
        "address": {"anyOf": [{"$ref": "#/$defs/address"}, {"type": "null"}]},
    }
    item = {
        "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "count": {"type": "integer", "minimum": 1, "maximum": 999},
        "cents": cents,
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    }
    order = {
        "id": {"type": "integer", "minimum": 0, "maximum": 10_000_000},
        "created": {"type": "string", "format": "date"},
        "status": {"enum": ["new", "paid", "sent", "returned"]},
        "customer": close_object(customer),
        "items": {"type": "array", "minItems": 1, "maxItems": 5, "items": {"$ref": "#/$defs/item"}},
        "total": cents,
        "labels": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 20}, "maxProperties": 4},
        name: text,
    }
    return {
        "type": "array",
        "minItems": 100_000,
        "items": close_object(order),
        "$defs": {"address": close_object(address), "item": close_object(item)},
    }


def make_body(model: str, num_tokens: int, schema: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "max_tokens": num_tokens, "temperature": 0.6, **fields}
    if schema is None:
        return {**body, "ignore_eos": True}
    wish = {"type": "json_schema", "json_schema": {"name": "orders", "schema": schema, "strict": True}}
    return {**body, "response_format": wish}


# What every second request follows, and what the others do.
KINDS = {
    "plain": (None, None),
    "alike": (None, None),
    "schema": (make_schema(), make_schema()),
    "half": (make_schema(), None),
}


class Load:
    def __init__(self, session: aiohttp.ClientSession, args: argparse.Namespace, model: str) -> None:
        self._session = session
        self._args = args
        self._model = model
        self.name = secrets.token_hex(4)
        self._bias: dict[str, float] = {}
        self._prompts = count()

    async def find_ends(self, bias: float) -> None:
        """Gives the tokens that end a string a bias from now on."""
        for text in ENDS:
            body = {"prompt": text, "add_special_tokens": False}
            async with self._session.post("/tokenize", json=body) as response:
                self._bias[str((await response.json())["tokens"][0])] = bias

    def make_body(self, kind: str, place: int, **fields: Any) -> dict[str, Any]:
        """Makes the body of the request at a place among those of a kind."""
        schema = KINDS[kind][place % 2]
        sign = 1 if schema or kind == "alike" else -1
        bias = {token: sign * value for token, value in self._bias.items()}
        return make_body(self._model, self._args.tokens, schema, prompt=self.make_prompt(), logit_bias=bias, **fields)

    async def read_masks(self) -> tuple[float, float, float]:
        """Returns rows with masks, seconds in which they were made, and for which the device waited for them."""
        async with self._session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in METRICS]
        return found[0], found[1], found[2]

    def make_prompt(self) -> str:
        """Makes a prompt that no cache has."""
        return f"Order {self.name} {next(self._prompts)}: " + "list all orders of the day as JSON. " * 20

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

    async def run_samples(self, kind: str) -> float:
        args, began = self._args, time.perf_counter()
        bodies = [self.make_body(kind, place, n=args.samples) for place in range(args.prompts)]
        tokens = sum(await asyncio.gather(*map(self.post, bodies)))
        return tokens / (time.perf_counter() - began)

    async def run_users(self, kind: str) -> float:
        args, began = self._args, time.perf_counter()

        async def use(place: int) -> int:
            total = 0
            for _ in range(args.requests):
                total += (await self.time_stream(self.make_body(kind, place)))[1]
            return total

        tokens = sum(await asyncio.gather(*map(use, range(args.users))))
        return tokens / (time.perf_counter() - began)


async def measure(args: argparse.Namespace) -> None:
    async with aiohttp.ClientSession(args.url, timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get("/v1/models") as response:
            model: str = (await response.json())["data"][0]["id"]
        load = Load(session, args, model)
        if args.ends:
            await load.find_ends(args.ends)
        if args.what == "first":
            await measure_first(load, model)
            return
        run = load.run_samples if args.what == "samples" else load.run_users
        rates: dict[str, list[float]] = {kind: [] for kind in args.kinds}
        before = await load.read_masks()
        for turn in range(1 + args.rounds):
            for kind, each in rates.items():
                rate = await run(kind)
                if turn:
                    each.append(rate)
        rows, made, waited = (now - old for now, old in zip(await load.read_masks(), before, strict=True))
    if rows:
        print(f"masks: {1e6 * made / rows:.1f} us a row of the host, {1e6 * waited / rows:.2f} us of the device's time")
    medians = {kind: statistics.median(each) for kind, each in rates.items()}
    for kind, each in rates.items():
        share = f", {medians[kind] / medians['plain']:.3f} of plain" if "plain" in medians else ""
        spread = ", ".join(f"{rate:.0f}" for rate in each)
        print(f"{args.what}: {kind} {medians[kind]:.0f} tokens/s{share} ({spread})")


async def measure_first(load: Load, model: str) -> None:
    times: dict[str, list[float]] = {"plain": [], "known": [], "new": []}
    for number in range(NUM_FIRST + 1):
        schemas = {"plain": None, "known": make_schema(), "new": make_schema(f"note_{load.name}_{number}")}
        for kind, schema in schemas.items():
            body = make_body(model, 4, schema, prompt=load.make_prompt())
            times[kind].append((await load.time_stream(body))[0])
    for kind, each in times.items():
        measured = [1000 * seconds for seconds in each[1:]]
        print(f"first tokens: {kind} {statistics.median(measured):.1f} ms, at most {max(measured):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("what", choices=["samples", "users", "first"])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=500, help="of each prompt")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2, help="of each user")
    parser.add_argument("--tokens", type=int, default=128, help="of each sample")
    parser.add_argument("--rounds", type=int, default=3, help="that are measured, behind one that is not")
    parser.add_argument("--ends", type=float, default=0.0, metavar="BIAS", help="of tokens that end a string")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["plain", "schema"])
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
