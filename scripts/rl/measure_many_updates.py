"""Time and memory of many updates under load: neither may grow.

    python scripts/rl/measure_many_updates.py demo --updates 50 model.device=cpu

Starts a server, samples from it without a pause, and gives it all weights again and again through shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file

from toka_async.bench.loads.served import serve
from toka_async.checkpoint.hub import resolve_model
from toka_async.client import Client, RequestError, Trainer

WARM = 5  # updates that do not count
BUCKET = 1 << 28
PROMPTS = [[5, 6, number] for number in range(10, 42)]


def resident_bytes(pids: list[int]) -> int:
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids)


async def sample(client: Client, stop: asyncio.Event) -> int:
    count = 0
    while not stop.is_set():
        with suppress(RequestError):
            results = await client.generate_many(PROMPTS, max_tokens=64, ignore_eos=True, text=False)
            count += sum(each.samples[0].token_ids.size for each in results)
    return count


async def measure(model: Path, num_updates: int, overrides: list[str]) -> None:
    tensors = load_file(model / "model.safetensors")
    with TemporaryDirectory() as folder:
        address = f"ipc://{folder}/direct"
        with serve([f"model.path={model}", f"zmq.bind={address}", "server.admin=true", *overrides]) as server:
            pids = list(server.children.values())
            async with Client(address) as client:
                trainer, stop = Trainer(client), asyncio.Event()
                loads = [asyncio.create_task(sample(client, stop)) for _ in range(2)]
                seconds, cpu, sizes = list[float](), list[float](), list[int]()
                for number in range(num_updates):
                    await asyncio.sleep(0.1)
                    began, used = time.perf_counter(), sum(server.cpu_seconds().values())
                    await trainer.update(tensors.items(), f"v{number}", BUCKET)
                    seconds.append(time.perf_counter() - began)
                    cpu.append(sum(server.cpu_seconds().values()) - used)
                    sizes.append(resident_bytes(pids))
                stop.set()
                num_tokens = sum(await asyncio.gather(*loads))
    num_each = max(1, (num_updates - WARM) // 4)  # in each group
    print(
        f"{num_updates} updates, {num_tokens:,} tokens; updates {WARM + 1} to {WARM + num_each}, the last {num_each}:"
    )
    for name, values in (("seconds", seconds), ("CPU seconds of the server's processes", cpu)):
        early, late = (statistics.fmean(each) for each in (values[WARM : WARM + num_each], values[-num_each:]))
        print(f"  mean {name} {early:.4f}, {late:.4f}")
    print(
        f"  MiB of all processes after {WARM} updates {sizes[WARM - 1] / 2**20:.1f}, at the end {sizes[-1] / 2**20:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, or demo")
    parser.add_argument("--updates", type=int, default=50)
    args, overrides = parser.parse_known_args()
    asyncio.run(measure(resolve_model(args.model), args.updates, overrides))


if __name__ == "__main__":
    main()
