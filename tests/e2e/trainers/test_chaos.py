"""Updates at random while ranks are killed at random: no answer mixes versions, and nothing hangs.

The time is that of the variable CHAOS_SECONDS, or a minute.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cases.models import heads, make_checkpoint
from tests.drivers.engine import Engine
from tests.drivers.weight_updates import read_checkpoint
from tests.processes.serving import Serving, free_port, serving
from toka_async.bench.loads.served import list_children
from toka_async.client import Client, CommandError, RequestError, Trainer

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
PROMPTS = [[i, 2, 3, 4, 5, 6, 7, 8, 9] * (1 + i % 4) for i in range(12)]
NUM_TOKENS = 60
BUCKET = 1 << 18
LONGEST = 200.0  # seconds that an update or an answer may take, with all restarts of replicas


def greedy_of(folder: Path) -> list[list[int]]:
    engine = Engine(folder, batch_invariant=True)
    return [each.samples[0].token_ids for each in engine.run(PROMPTS, max_tokens=NUM_TOKENS)]


async def push(trainer: Trainer, folder: Path, version: str) -> None:
    """Updates until it succeeds: nothing computes while weights are of two versions."""
    tensors = read_checkpoint(folder)
    while True:
        try:
            state = await trainer.state()
            if not (state.is_torn or state.is_updating):
                await trainer.pause("wait")
            await trainer.update(tensors.items(), version, BUCKET)
            await trainer.resume()
            return
        except CommandError:  # a replica has died in the middle, or none is there
            await asyncio.sleep(0.2)


async def ask(client: Client, expected: list[list[list[int]]], stop: asyncio.Event) -> int:
    """Asks again and again; returns how many answers came. Each is that of one version as a whole, which it names."""
    rng, count = random.Random(), 0
    while not stop.is_set():
        place = rng.randrange(len(PROMPTS))
        with suppress(RequestError):  # its replica died after it had begun twice, or none is there
            result = await asyncio.wait_for(
                client.generate(PROMPTS[place], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, text=False),
                LONGEST,
            )
            (span,) = result.samples[0].versions
            weights = int(span.version.removeprefix("v")) % 2 if span.version != "default" else 0
            assert result.samples[0].token_ids.tolist() == expected[weights][place], f"not of version {span.version}"
            count += 1
    return count


def kill_one(server: Serving, rng: random.Random) -> None:
    ranks = {name: pid for name, pid in list_children(server.process.pid).items() if name.startswith(("rank", "sched"))}
    if ranks:
        with suppress(ProcessLookupError):
            os.kill(rng.choice(sorted(ranks.values())), signal.SIGKILL)


@pytest.mark.slow
async def test_kills_and_updates_at_random(tmp_path: Path) -> None:
    folders = [tmp_path / "old", tmp_path / "new"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        make_checkpoint(folder, "qwen3", seed=seed, **heads(4, 2, 48))
    expected = [greedy_of(folder) for folder in folders]
    url, rng, loop = f"tcp://127.0.0.1:{free_port()}", random.Random(5), asyncio.get_running_loop()
    options = ("model.batch_invariant=true", "server.admin=true", "server.control_timeout=30", "parallel.dp=2")
    with serving(tmp_path, f"model.path={folders[0]}", "model.device=cpu", f"zmq.bind={url}", *options) as server:
        async with Client(url) as client:
            trainer, stop, num_updates = Trainer(client), asyncio.Event(), 0
            asking = [asyncio.create_task(ask(client, expected, stop)) for _ in range(6)]
            end = loop.time() + SECONDS
            while loop.time() < end:
                kill = loop.call_later(rng.uniform(0, 6), kill_one, server, rng) if rng.random() < 0.3 else None
                await asyncio.wait_for(push(trainer, folders[num_updates % 2], f"v{num_updates}"), LONGEST)
                num_updates += 1
                if kill is not None and loop.time() > kill.when():
                    assert not any(task.done() for task in asking)
                await asyncio.wait(asking, timeout=rng.uniform(0, 1.0))
            stop.set()
            counts = await asyncio.wait_for(asyncio.gather(*asking), LONGEST)
        assert sum(counts) > 0
        assert num_updates > 3
        print(f"{num_updates} updates, {sum(counts)} answers")
        server.children = list_children(server.process.pid)
