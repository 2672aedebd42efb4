"""Tokens per second that users who stream get from a running server: one alone, and many together.

    toka-async serve model.path=demo
    python scripts/measure_streaming.py --users 64
    python scripts/measure_streaming.py --prompt-tokens 512 --tokens 1  # the time to a first token

Every run asks for `--tokens` tokens with `ignore_eos`; medians of `--runs`. Knows the HTTP API only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time

import aiohttp

IDS = range(100, 200)  # of any model's vocabulary
PROMPT = "Question: Tom has 12 apples. He buys 7 more and gives 5 to Ana. How many apples does Tom have?\nAnswer:"


async def stream(session: aiohttp.ClientSession, args: argparse.Namespace, seed: int) -> tuple[float, int]:
    """Seconds to the first piece, and the number of tokens that the server counted."""
    body = {
        "model": args.model,
        "prompt": random.Random(seed).choices(IDS, k=args.prompt_tokens) if args.prompt_tokens else PROMPT,
        "max_tokens": args.tokens,
        "ignore_eos": True,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first, num_tokens = time.perf_counter(), 0.0, 0
    async with session.post(f"{args.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            first = first or time.perf_counter() - started
            if b'"completion_tokens":' in line:
                num_tokens = int(line.split(b'"completion_tokens":')[1].split(b",")[0])
    assert num_tokens == args.tokens, f"asked for {args.tokens} tokens, got {num_tokens}"
    return first, num_tokens


async def measure(session: aiohttp.ClientSession, args: argparse.Namespace, users: int) -> tuple[float, float]:
    """Medians over the runs: tokens per second of all users together, and seconds to the first piece."""
    rates, firsts = [], []
    for run in range(args.runs):
        started = time.perf_counter()
        results = await asyncio.gather(*(stream(session, args, run * users + user) for user in range(users)))
        rates.append(sum(tokens for _, tokens in results) / (time.perf_counter() - started))
        firsts.append(statistics.median(first for first, _ in results))
    return statistics.median(rates), statistics.median(firsts)


async def main(args: argparse.Namespace) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        await stream(session, args, 0)
        for users in (1, args.users):
            rate, first = await measure(session, args, users)
            load = os.getloadavg()[0]
            print(f"{users:4} users: {rate:8.0f} tokens/s, first piece after {first * 1000:.1f} ms, load {load:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:10210")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument(
        "--prompt-tokens", type=int, default=0, help="random ids instead of a question; 0: the question"
    )
    parser.add_argument("--runs", type=int, default=5)
    asyncio.run(main(parser.parse_args()))
