"""A Ray fleet beside one engine with as many replicas, on this machine's GPUs.

    python scripts/measure_fleet.py 2 MODEL model.load=random schedule.max_seqs=4096
    python scripts/measure_fleet.py 2 demo model.device=cpu --gpus 0 --cpus 8 --prompts 2 --samples 8 --rows 2000

Prints tokens a second of `parallel.dp=N`, of a fleet of N replicas with the same load, and of a job of Ray Data with
the same rows as a client of `parallel.dp=N`. Kills a worker under load: prints after how long its GPU's memory is free
and its replica is back. Fails if a request is lost or has another number of tokens than it asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from toka_async.bench.loads.served import serve
from toka_async.client import Client, Pool
from toka_async.client.fields import Fields
from toka_async.client.results import Result
from toka_async.ray import Fleet
from toka_async.ray.data import generate

FIRST_ID, NUM_IDS = 100, 400  # token ids of prompts, in every vocabulary
PROMPT_TOKENS = 600
ROW_PROMPT_TOKENS = 64
ROUNDS = 3
FREE = 2048  # MiB that a GPU without an engine may hold

Generate = Callable[[list[int]], Awaitable[Result]]


def make_prompts(count: int, num_tokens: int) -> list[list[int]]:
    ids: list[list[int]] = np.random.default_rng(0).integers(FIRST_ID, FIRST_ID + NUM_IDS, (count, num_tokens)).tolist()
    return ids


def make_fields(samples: int, num_tokens: int) -> Fields:
    return Fields(max_tokens=num_tokens, n=samples, temperature=0.6, text=False, ignore_eos=True)


async def time_load(generate_one: Generate, prompts: Sequence[list[int]], samples: int, num_tokens: int) -> float:
    """Returns tokens a second of a request for each prompt, all at once."""
    began = time.perf_counter()
    results = await asyncio.gather(*map(generate_one, prompts))
    seconds = time.perf_counter() - began
    for result in results:
        assert [sample.token_ids.size for sample in result.samples] == [num_tokens] * samples
    return len(prompts) * samples * num_tokens / seconds


async def measure_samples(client: Client | Pool, args: argparse.Namespace) -> float:
    """Returns the median of some rounds, after a first one that does not count."""
    fields = make_fields(args.samples, args.tokens)
    prompts = make_prompts(args.prompts, args.prompt_tokens)
    rates = [
        await time_load(lambda prompt: client.generate(prompt, **fields), prompts, args.samples, args.tokens)
        for _ in range(1 + ROUNDS)
    ]
    print(f"  rounds: {', '.join(f'{rate:.0f}' for rate in rates)}", flush=True)
    return statistics.median(rates[1:])


async def measure_rows(client: Client, args: argparse.Namespace) -> float:
    """Returns tokens a second of the rows of the job, sent in calls of 1,024 prompts."""
    fields = make_fields(1, args.tokens)
    prompts = make_prompts(args.rows, args.row_prompt_tokens)
    calls = [prompts[start : start + 1024] for start in range(0, len(prompts), 1024)]
    began = time.perf_counter()
    results = await asyncio.gather(*(client.generate_many(call, **fields) for call in calls))
    seconds = time.perf_counter() - began
    assert all(result.samples[0].token_ids.size == args.tokens for some in results for result in some)
    return float(args.rows * args.tokens / seconds)


async def measure_engine(args: argparse.Namespace) -> tuple[float, float]:
    """Returns tokens a second of samples, and of rows, of one engine with `parallel.dp`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with serve([f"model.path={args.model}", f"parallel.dp={args.replicas}", f"zmq.bind={address}", *args.overrides]):
        async with Client(address) as client:
            return await measure_samples(client, args), await measure_rows(client, args)


def read_gpu_memory() -> list[int]:
    """Returns the MiB that each GPU holds; empty where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return [int(line) for line in subprocess.run(query, capture_output=True, check=True, text=True).stdout.split()]
    except FileNotFoundError:
        return []


async def kill_worker(fleet: Fleet, pool: Pool, args: argparse.Namespace) -> str:
    """Kills the worker of a replica under load; returns what was seen. All requests have to end well."""
    fields = make_fields(args.samples, args.tokens)
    prompts = make_prompts(4 * args.prompts, args.prompt_tokens)
    load = asyncio.create_task(
        time_load(lambda prompt: pool.generate(prompt, **fields), prompts, args.samples, args.tokens)
    )
    await asyncio.sleep(1.0)  # it is under load by then
    place = fleet.list_statuses()[0].place
    assert place is not None
    freed = 0.0
    began = time.perf_counter()

    def watch() -> None:
        nonlocal freed
        while all(used > FREE for used in read_gpu_memory()):
            time.sleep(0.1)
        freed = time.perf_counter() - began

    watcher = threading.Thread(target=watch)
    if read_gpu_memory():
        watcher.start()
    os.kill(place.worker, signal.SIGKILL)
    while (status := (await asyncio.to_thread(fleet.list_statuses))[0]).life == 0 or status.state != "serving":
        await asyncio.sleep(0.1)
    back = time.perf_counter() - began
    if watcher.is_alive() or freed:
        watcher.join()
    rate = await load
    return (
        f"memory free after {freed:.1f} s, back after {back:.1f} s; {len(prompts)} requests ended, {rate:.0f} tokens/s"
    )


async def measure_fleet(args: argparse.Namespace) -> float:
    """Returns tokens a second of samples."""
    config = dict(override.split("=", 1) for override in args.overrides)
    began = time.perf_counter()
    with Fleet(args.replicas, args.model, **config) as fleet:
        await asyncio.to_thread(fleet.wait)
        load_seconds = time.perf_counter() - began
        async with fleet.pool() as pool:
            rate = await measure_samples(pool, args)
            print(f"fleet: all replicas ready after {load_seconds:.1f} s; worker killed: ", end="", flush=True)
            print(await kill_worker(fleet, pool, args), flush=True)
    return rate


def measure_job(args: argparse.Namespace, folder: Path) -> tuple[float, float]:
    """Returns tokens a second of a job of Ray Data: over all of it, and from the first answer on."""
    source = folder / "in"
    source.mkdir()
    table = pa.table({"id": range(args.rows), "prompt": make_prompts(args.rows, args.row_prompt_tokens)})
    pq.write_table(table, source / "rows.parquet", row_group_size=4096)
    output = folder / "out"
    config = dict(override.split("=", 1) for override in args.overrides)
    began = time.perf_counter()
    answered = generate(
        ray.data.read_parquet(str(source)),
        model=args.model,
        id_column="id",
        output=str(output),
        sampling={"max_tokens": args.tokens, "temperature": 0.6, "ignore_eos": True},
        replicas=args.replicas,
        block_rows=args.block_rows,
        **config,
    )
    seconds = time.perf_counter() - began
    assert answered.count() == args.rows
    assert answered.sum("num_generated_tokens") == args.rows * args.tokens
    ends = sorted(path.stat().st_mtime for path in output.rglob("*.parquet"))
    later = args.tokens * sum(
        pq.ParquetFile(path).metadata.num_rows for path in output.rglob("*.parquet") if path.stat().st_mtime > ends[0]
    )
    return args.rows * args.tokens / seconds, later / max(ends[-1] - ends[0], 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("replicas", type=int)
    parser.add_argument("model")
    parser.add_argument("--gpus", type=int, help="that Ray counts; default: a GPU for each replica")
    parser.add_argument("--cpus", type=int, help="that Ray counts; default: this machine's")
    parser.add_argument("--prompts", type=int, default=16, help="requests at once")
    parser.add_argument("--samples", type=int, default=512, help="of each")
    parser.add_argument("--tokens", type=int, default=128, help="of each sample, and of each row's answer")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--row-prompt-tokens", type=int, default=ROW_PROMPT_TOKENS)
    parser.add_argument("--rows", type=int, default=100_000, help="of the job")
    parser.add_argument("--block-rows", type=int, default=8192, help="of a block of the job")
    args, rest = parser.parse_known_args()
    args.overrides = rest
    one, rows = asyncio.run(measure_engine(args))
    print(f"parallel.dp={args.replicas}: samples {one:.0f} tokens/s, {args.rows} rows {rows:.0f} tokens/s", flush=True)
    ray.init(
        num_cpus=args.cpus,
        num_gpus=args.replicas if args.gpus is None else args.gpus,
        include_dashboard=False,
        log_to_driver=False,
    )
    fleet = asyncio.run(measure_fleet(args))
    print(f"fleet: samples {fleet:.0f} tokens/s, {fleet / one:.3f} of the one engine", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        job, steady = measure_job(args, Path(folder))
    print(
        f"job: {job:.0f} tokens/s with the start of its engines, {steady:.0f} from its first file on: "
        f"{job / rows:.3f} and {steady / rows:.3f} of the client"
    )


if __name__ == "__main__":
    main()
