"""Small requests per second through ZeroMQ, `LLM` and HTTP, side by side, on a simulated rank: all but the model.

    python scripts/measure_zmq.py 100000
    python scripts/measure_zmq.py 1000000 --http 0 --one-by-one
    python scripts/measure_zmq.py 100000 --http 0 --samples 8

Starts a server for each, and a client in a process of its own, which checks that each answer has its tokens. `LLM`
starts its own engine, gets all prompts in one call, and makes the texts of its outputs. CPU times are of whole
processes, client included. The machine's cores are shared by all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import uvloop

from toka_async import LLM, SamplingParams, TokensPrompt
from toka_async.bench.load import LoadShape, run_apart
from toka_async.bench.loads.served import Served, cpu_seconds, list_children, serve
from toka_async.client import Client, Fields
from toka_async.client.results import Result

VOCAB = 512  # ids below it are in the built-in model's vocabulary
AHEAD = 32  # calls of generate_many at once


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What the client's process does: `requests` in all, `chunk` a call."""

    url: str
    requests: int
    chunk: int
    prompt_tokens: int
    output_tokens: int
    samples: int
    one_by_one: bool
    overrides: list[str]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """cpu_seconds: of the client. engine: of the engine's processes, where the client has its own."""

    seconds: float
    cpu_seconds: float
    engine: dict[str, float] = {}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check(results: list[Result], work: Work) -> None:
    for result in results:
        assert len(result.samples) == work.samples
        for sample in result.samples:
            assert sample.finish_reason == "length", sample
            assert sample.token_ids.size == work.output_tokens, sample


def make_prompts(work: Work) -> npt.NDArray[np.int32]:
    return np.random.default_rng(0).integers(1, VOCAB, (work.requests, work.prompt_tokens), np.int32)


def make_fields(work: Work) -> Fields:
    return Fields(max_tokens=work.output_tokens, n=work.samples, text=False, ignore_eos=True)


def run_llm(work: Work) -> Done:
    """Give an `LLM` all of the work in one call, and check the outputs."""
    options: dict[str, Any] = dict(override.split("=", 1) for override in work.overrides)
    with LLM(options.pop("model.path"), **options) as llm:
        (engine,) = list_children(os.getpid()).values()
        params = SamplingParams(max_tokens=work.output_tokens, n=work.samples, ignore_eos=True)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in make_prompts(work).tolist()]
        llm.generate(prompts[:2000], params)
        children = list_children(engine)
        before = {name: cpu_seconds(pid) for name, pid in children.items()}
        cpu, began = time.process_time(), time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        for output in outputs:
            assert len(output.outputs) == work.samples
            assert all(len(sample.token_ids) == work.output_tokens for sample in output.outputs)
            assert all(sample.text for sample in output.outputs)
        engine_seconds = {name: cpu_seconds(pid) - before[name] for name, pid in children.items()}
        return Done(seconds=seconds, cpu_seconds=cpu, engine=engine_seconds)


async def client(work: Work) -> Done:
    """Sends all of the work, so many calls at a time."""
    prompts, fields = make_prompts(work), make_fields(work)
    numbers = iter(range(0, work.requests, work.chunk))

    async def run(client: Client) -> None:
        for start in numbers:
            chunk = list(prompts[start : start + work.chunk])
            if work.one_by_one:
                calls = [client.generate(prompt, **fields) for prompt in chunk]
                results = await asyncio.gather(*calls)
            else:
                results = await client.generate_many(chunk, **fields)
            assert len(results) == len(chunk)
            check(results, work)

    async with Client(work.url) as connected:
        cpu, began = time.process_time(), time.perf_counter()
        await asyncio.gather(*(run(connected) for _ in range(AHEAD)))
        return Done(seconds=time.perf_counter() - began, cpu_seconds=time.process_time() - cpu)


def run_client(work: Work, kind: str = "zmq") -> Done:
    command = [sys.executable, __file__, "--client", kind]
    done = subprocess.run(command, input=msgspec.json.encode(work), stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Done)


def overrides(args: argparse.Namespace) -> list[str]:
    pages = 2 + (args.prompt_tokens + args.output_tokens) // 16
    return [
        "model.path=demo",
        "model.device=simulated",
        f"schedule.max_seqs={args.sequences}",
        "schedule.max_tokens=32768",
        f"cache.num_tokens={16 * pages * args.sequences * 2}",
        "log.stats_interval=0",
    ]


def peak_memory(served: Served) -> str:
    """Of each process, in MB, from its start on."""
    peaks = []
    for process, pid in served.children.items():
        status = Path(f"/proc/{pid}/status").read_text()
        kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        peaks.append(f"{process} {kilobytes / 1024:.0f}")
    return ", ".join(peaks)


def report(name: str, served: Served, before: dict[str, float], requests: int, done: Done) -> float:
    cpu = {process: seconds - before[process] for process, seconds in served.cpu_seconds().items()}
    return tell(name, cpu, requests, done, f"peak MB: {peak_memory(served)}; ")


def tell(name: str, cpu: dict[str, float], requests: int, done: Done, more: str = "") -> float:
    cpu["client"] = done.cpu_seconds
    each = ", ".join(f"{process} {seconds / requests * 1e6:.1f}" for process, seconds in cpu.items())
    rate = requests / done.seconds
    print(
        f"{name}: {requests} requests in {done.seconds:.2f} s: {rate:.0f} requests/s; "
        f"CPU us a request: {sum(cpu.values()) / requests * 1e6:.1f} ({each}); "
        f"{more}load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return rate


def make_work(args: argparse.Namespace, url: str = "") -> Work:
    return Work(
        url=url,
        requests=args.requests,
        chunk=args.chunk,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        samples=args.samples,
        one_by_one=args.one_by_one,
        overrides=[*overrides(args), *args.overrides],
    )


def measure_llm(args: argparse.Namespace) -> float:
    done = run_client(make_work(args), "llm")
    return tell("LLM", done.engine, args.requests, done)


def measure_zmq(args: argparse.Namespace) -> float:
    url = f"tcp://127.0.0.1:{free_port()}"
    work = make_work(args, url)
    with serve([*overrides(args), f"zmq.bind={url}", *args.overrides]) as served:
        run_client(msgspec.structs.replace(work, requests=2000))
        before = served.cpu_seconds()
        return report("ZeroMQ", served, before, args.requests, run_client(work))


def measure_http(args: argparse.Namespace, requests: int) -> float:
    with serve([*overrides(args), *args.overrides]) as served:
        load = LoadShape(
            url=served.url,
            model="demo",
            connections=args.connections,
            waves=max(1, requests // args.connections),
            samples=args.samples,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            vocab_size=VOCAB,
            stream=False,
        )
        run_apart(msgspec.structs.replace(load, waves=2))
        before, result = served.cpu_seconds(), run_apart(load)
        done = Done(seconds=result.seconds, cpu_seconds=result.cpu_seconds)
        return report("HTTP", served, before, load.connections * load.waves, done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=int, nargs="?", default=100_000, help="through ZeroMQ")
    parser.add_argument("--http", type=int, help="requests through HTTP; default: a tenth; 0: none")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=1024, help="that run at once")
    parser.add_argument("--chunk", type=int, default=256, help="prompts of a call")
    parser.add_argument("--connections", type=int, default=128, help="of the HTTP client")
    parser.add_argument("--one-by-one", action="store_true", help="a call of generate for each request")
    parser.add_argument("--samples", type=int, default=1, help="of each prompt")
    parser.add_argument("--client", choices=("zmq", "llm"), help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    args.overrides = rest
    if args.client:
        work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
        done = run_llm(work) if args.client == "llm" else uvloop.run(client(work))
        sys.stdout.buffer.write(msgspec.json.encode(done))
        return
    over_zmq = measure_zmq(args)
    print(f"LLM / ZeroMQ: {measure_llm(args) / over_zmq:.2f}", flush=True)
    if requests := args.requests // 10 if args.http is None else args.http:
        print(f"ZeroMQ / HTTP: {over_zmq / measure_http(args, requests):.1f}")


if __name__ == "__main__":
    main()
