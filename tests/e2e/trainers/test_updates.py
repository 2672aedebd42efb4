"""A trainer and a server in real processes: pauses at any point, aborts, and new weights over every transport of CPUs.

The engine computes a row with the same bits in every batch, so what a pause changes would be seen.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.models import heads, make_checkpoint
from tests.drivers.engine import Engine
from tests.drivers.until import until
from tests.drivers.weight_updates import read_checkpoint
from tests.processes.serving import Serving, free_port, serving
from toka_async.bench.loads.served import list_children
from toka_async.client import Client, CommandError, Result, Trainer
from toka_async.control import Broadcast, GroupTransfer
from toka_async.transfer.checksum import sum_tensors
from toka_async.transfer.deadline import Deadline
from toka_async.transfer.tensors import describe_tensor
from toka_async.transfer.torch_group import TorchGroup, join_torch_group
from toka_async.transfer.wire import send_tensors

LAYOUTS = {
    "stages": ("parallel.dp=2", "parallel.pp=2"),
    "replicas": ("parallel.dp=2",),
    "tensor": ("parallel.tp=2",),
    "pipeline": ("parallel.pp=2",),
}
SHAPE: dict[str, Any] = heads(4, 2, 48, num_hidden_layers=2)
PROMPTS = [[i, 2, 3, 4, 5, 6, 7, 8, 9] * (1 + i % 3) for i in range(8)]
NUM_TOKENS = 120
BUCKET = 1 << 18
CPU = torch.device("cpu")
TIMEOUT = 20


@dataclass
class Served:
    server: Serving
    url: str
    old: Path
    new: Path
    port: int
    world_size: int


def list_layouts() -> list[Any]:
    first, *others = LAYOUTS
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.fixture(scope="module", params=list_layouts())
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, url = tmp_path_factory.mktemp(request.param), f"tcp://127.0.0.1:{free_port()}"
    for seed, name in enumerate(("old", "new")):
        (folder / name).mkdir()
        make_checkpoint(folder / name, "qwen3", seed=seed, **SHAPE)
    layout = LAYOUTS[request.param]
    overrides = (f"model.path={folder / 'old'}", "model.batch_invariant=true", "server.admin=true", f"zmq.bind={url}")
    num_ranks = 2 ** len(layout)
    with serving(folder, *overrides, *layout, "model.device=cpu", f"server.control_timeout={TIMEOUT}") as server:
        yield Served(server, url, folder / "old", folder / "new", free_port(), num_ranks)


@asynccontextmanager
async def trainer_of(served: Served) -> AsyncIterator[tuple[Client, Trainer]]:
    """Leaves the engine with its first weights, and running."""
    async with Client(served.url) as client:
        trainer = Trainer(client)
        try:
            yield client, trainer
        finally:
            if (await trainer.state()).is_updating:
                await trainer.abandon_update()
            if (await trainer.state()).is_asleep:
                await trainer.wake()
            if (await trainer.state()).weight_version != "default" or (await trainer.state()).is_torn:
                await trainer.update_from(served.old, "default")
            await trainer.resume()


async def sample(client: Client, **fields: Any) -> list[Result]:
    given: dict[str, Any] = {"max_tokens": NUM_TOKENS, "logprobs": 0, "ignore_eos": True, "text": False} | fields
    return await client.generate_many(PROMPTS, seeds=range(len(PROMPTS)), **given)


def bits(results: list[Result]) -> list[tuple[list[int], bytes]]:
    return [(each.token_ids.tolist(), each.logprobs.tobytes()) for result in results for each in result.samples]


async def check_pauses(served: Served, num_pauses: int) -> None:
    rng = random.Random(num_pauses)
    async with trainer_of(served) as (client, trainer):
        expected = bits(await sample(client, n=2))
        done = 0
        while done < num_pauses:
            await trainer.reset_prefix_cache()
            task = asyncio.create_task(sample(client, n=2))
            while not task.done() and done < num_pauses:
                await asyncio.wait({task}, timeout=rng.uniform(0, 0.03))  # any point
                await trainer.pause("retract" if rng.random() < 0.1 else "keep")
                assert (await trainer.state()).is_paused
                await trainer.resume()
                done += 1
            assert bits(await asyncio.wait_for(task, 120)) == expected


async def test_pauses_that_keep_change_no_bit(served: Served) -> None:
    await check_pauses(served, 12)


@pytest.mark.slow
async def test_a_hundred_pauses_change_no_bit(served: Served) -> None:
    await check_pauses(served, 100)


async def test_what_was_aborted_goes_on_as_if_it_had_not_been(served: Served) -> None:
    async with trainer_of(served) as (client, trainer):
        whole = await sample(client, temperature=0)
        task = asyncio.create_task(sample(client, temperature=0, max_tokens=400))
        while served.server.metric("num_requests_running") < len(PROMPTS):
            await asyncio.sleep(0.001)
        await trainer.pause("abort")
        parts = [each.samples[0] for each in await asyncio.wait_for(task, 60)]
        assert {part.finish_reason for part in parts} == {"abort"}
        assert all(part.logprobs.size == part.token_ids.size for part in parts)
        waiting = asyncio.create_task(client.generate([1, 2, 3], max_tokens=5, text=False))
        queued = asyncio.create_task(client.generate([1, 2], max_tokens=5, text=False))
        await until_held(trainer, 2)
        assert (await queued).samples[0].token_ids.size == 0
        assert (await waiting).samples[0].finish_reason == "abort"
        await trainer.resume()
        for prompt, part, result in zip(PROMPTS, parts, whole, strict=True):
            tokens = part.token_ids.tolist()[: NUM_TOKENS - 1]
            rest = await client.generate(
                [*prompt, *tokens], max_tokens=NUM_TOKENS - len(tokens), temperature=0, ignore_eos=True, text=False
            )
            assert [*tokens, *rest.samples[0].token_ids.tolist()] == result.samples[0].token_ids.tolist()


async def until_held(trainer: Trainer, count: int) -> None:
    """Aborts everything until so many requests have ended."""
    while count > 0:
        count -= await trainer.abort()


async def test_spans_cover_every_token_of_every_sample_once(served: Served) -> None:
    async with trainer_of(served) as (client, trainer):
        task = asyncio.create_task(sample(client, n=2))
        names = ["default"]
        while not task.done() and len(names) < 3:
            while not served.server.metric("num_requests_running"):
                await asyncio.sleep(0.001)
            await trainer.pause("keep")
            names.append(f"v{len(names)}")
            await trainer.update_from((served.old, served.new)[len(names) % 2], names[-1])
            await trainer.resume()
        samples = [each for result in await asyncio.wait_for(task, 120) for each in result.samples]
        assert len(names) == 3
        assert len(samples) == 2 * len(PROMPTS)
        for each in samples:
            ends = [0, *(span.end for span in each.versions)]
            assert [span.start for span in each.versions] == ends[:-1]
            assert ends[-1] == each.token_ids.size == each.logprobs.size
            assert all(span.start < span.end for span in each.versions)
            assert [span.version for span in each.versions] == sorted({span.version for span in each.versions})


def greedy_of(folder: Path) -> list[list[int]]:
    """What an engine gives that started with these weights."""
    engine = Engine(folder, batch_invariant=True)
    return [each.samples[0].token_ids for each in engine.run(PROMPTS, max_tokens=40)]


async def greedy(client: Client) -> tuple[list[list[int]], list[int]]:
    """Tokens of the prompts, and how many of each were found in the cache."""
    results = await sample(client, temperature=0, max_tokens=40)
    return [each.samples[0].token_ids.tolist() for each in results], [each.cached_tokens for each in results]


async def open_group(served: Served, trainer: Trainer) -> TorchGroup:
    transfer = GroupTransfer(
        address="127.0.0.1", port=served.port, rank_offset=1, world_size=served.world_size + 1, backend="gloo"
    )
    own = asyncio.create_task(asyncio.to_thread(join_torch_group, transfer, 0, CPU, Deadline(TIMEOUT)))
    await trainer.open_transfer(transfer)
    return await own


async def broadcast(trainer: Trainer, group: TorchGroup, tensors: dict[str, Tensor]) -> None:
    infos = [describe_tensor(*each) for each in tensors.items()]
    sent = asyncio.create_task(asyncio.to_thread(send_tensors, group, tensors.items(), Deadline(TIMEOUT)))
    try:
        await trainer.load(Broadcast(transfer="weight_update_group"), infos)
    finally:
        await asyncio.wait({sent})
    await sent


async def test_new_weights_arrive_over_every_transport(served: Served) -> None:
    expected = {folder: greedy_of(folder) for folder in (served.old, served.new)}
    tensors = {folder: read_checkpoint(folder) for folder in (served.old, served.new)}
    async with trainer_of(served) as (client, trainer):
        assert (await greedy(client))[0] == expected[served.old]
        state = await trainer.state()
        assert (state.weight_version, state.world_size) == ("default", served.world_size)

        await trainer.update(tensors[served.new].items(), "shared", BUCKET)
        assert await greedy(client) == (expected[served.new], [0] * len(PROMPTS))
        assert await trainer.checksum() == sum_tensors(tensors[served.new])
        assert (await trainer.state()).weight_version == "shared"

        await trainer.update_from(served.old, "folder")
        assert await greedy(client) == (expected[served.old], [0] * len(PROMPTS))

        group = await open_group(served, trainer)
        events = client.stream(PROMPTS[0], max_tokens=400, ignore_eos=True, text=False)
        spans = list((await anext(events)).versions)
        await trainer.pause("keep")
        await trainer.begin_update()
        for name, tensor in tensors[served.new].items():  # one by one, as some trainers do
            await broadcast(trainer, group, {name: tensor})
            assert (await trainer.state()).weight_version == "folder"
        await trainer.finish_update("group")
        assert (await trainer.state()).is_paused
        await trainer.resume()
        spans += [span async for event in events for span in event.versions]
        assert sum(span.end - span.start for span in spans) == 400
        versions = [span.version for span in spans]
        assert versions == sorted(versions)  # "folder" up to the pause, then "group"
        assert set(versions) == {"folder", "group"}
        await trainer.reset_prefix_cache()
        assert (await greedy(client))[0] == expected[served.new]
        await trainer.close_transfer("weight_update_group")
        group.close()


READ = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.v_proj.weight",
    "model.layers.1.mlp.gate_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)


async def test_tensors_are_read_by_their_names(served: Served) -> None:
    async with trainer_of(served) as (_, trainer):
        for folder in (served.new, served.old):
            await trainer.update_from(folder, folder.name)
            tensors = read_checkpoint(folder)
            for name, num_rows in product(READ, (1, 40, 100)):
                answer = served.server.post("/get_weights_by_name", name=name, truncate_size=num_rows)
                assert answer == (200, tensors[name][:num_rows].tolist()), name
        status, answer = served.server.post("/get_weights_by_name", name="model.layers.1.mlp.down_pro.weight")
        assert status == 400
        assert answer["error"]["message"] == (
            "model.layers.1.mlp.down_pro.weight: the model has no such tensor; "
            "did you mean model.layers.1.mlp.down_proj.weight?"
        )


async def test_every_fault_is_named_and_the_next_update_recovers(served: Served) -> None:
    tensors = read_checkpoint(served.new)
    name = "model.layers.1.mlp.down_proj.weight"
    faults: dict[str, dict[str, Tensor]] = {
        "model.layers.1.mlp.wrong.weight: the model has no such tensor": {
            "model.layers.1.mlp.wrong.weight": tensors[name]
        },
        f"{name} has shape": {name: tensors[name][1:].contiguous()},
        f"{name} is of type float8_e4m3fn": {name: tensors[name].to(torch.float8_e4m3fn)},
    }
    async with trainer_of(served) as (client, trainer):
        before = await trainer.checksum()
        for message, wrong in faults.items():
            with pytest.raises(CommandError, match=message):
                await trainer.update(wrong.items(), "wrong", BUCKET)
            state = await trainer.state()
            assert (state.is_paused, state.is_torn, state.weight_version) == (True, False, "default")
            assert await trainer.checksum() == before
        with pytest.raises(CommandError, match=f"{name} is missing from the update"):
            await trainer.update([each for each in tensors.items() if each[0] != name], "wrong", BUCKET)
        assert (await trainer.state()).is_torn
        with pytest.raises(CommandError, match="left weights of two versions"):
            await trainer.resume()

        group = await open_group(served, trainer)
        await trainer.begin_update()
        half = dict(list(tensors.items())[: len(tensors) // 2])
        infos = [describe_tensor(*each) for each in tensors.items()]
        loading = asyncio.create_task(trainer.load(Broadcast(transfer="weight_update_group"), infos))
        await asyncio.to_thread(send_tensors, group, half.items(), Deadline(TIMEOUT))
        group.close()  # as a trainer that is killed
        with pytest.raises(CommandError, match="the broadcast from the trainer failed"):
            await asyncio.wait_for(loading, 2 * TIMEOUT)
        state = await trainer.state()
        assert (state.is_paused, state.is_torn, state.weight_version) == (True, True, "default")

        await trainer.update(tensors.items(), "right", BUCKET)
        await trainer.resume()
        assert (await greedy(client))[0] == greedy_of(served.new)


async def test_a_sleeping_server_wakes_up_with_all_that_it_had(served: Served) -> None:
    async with trainer_of(served) as (client, trainer):
        expected = bits(await sample(client))
        await trainer.reset_prefix_cache()
        task = asyncio.create_task(sample(client))
        await trainer.sleep(1, "keep")
        with pytest.raises(CommandError, match="wake it first"):
            await trainer.resume()
        await trainer.wake()
        await trainer.resume()
        assert bits(await asyncio.wait_for(task, 60)) == expected
        with suppress(CommandError):
            await trainer.sleep(2)
        assert not (await trainer.state()).is_asleep


async def check_many_updates(served: Served, num_updates: int, num_warm: int) -> list[int]:
    """Updates under load; returns the resident bytes of all ranks after each of the last ones."""
    tensors = [read_checkpoint(folder) for folder in (served.old, served.new)]
    ranks = [pid for name, pid in served.server.children.items() if name.startswith("rank")]
    sizes: list[int] = []
    async with trainer_of(served) as (client, trainer):
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                await sample(client, max_tokens=40)

        clients = [asyncio.create_task(load()) for _ in range(2)]
        for number in range(num_updates):
            await trainer.update(tensors[number % 2].items(), f"v{number}", BUCKET)
            if number >= num_warm:
                sizes.append(sum(resident_bytes(pid) for pid in ranks))
        stop.set()
        await asyncio.gather(*clients)
    return sizes


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def test_updates_under_load(served: Served) -> None:
    await check_many_updates(served, 6, 2)


@pytest.mark.slow
async def test_fifty_updates_under_load_take_no_more_memory(served: Served) -> None:
    sizes = await check_many_updates(served, 50, 5)
    assert max(sizes) < 1.01 * sizes[0]


@pytest.mark.slow
async def test_nothing_waits_for_a_trainer_that_sends_nothing(served: Served) -> None:
    tensors = read_checkpoint(served.new)
    infos = [describe_tensor(*each) for each in tensors.items()]
    async with trainer_of(served) as (client, trainer):
        group = await open_group(served, trainer)
        await trainer.begin_update()
        with pytest.raises(CommandError, match="the broadcast from the trainer failed"):
            await asyncio.wait_for(trainer.load(Broadcast(transfer="weight_update_group"), infos), TIMEOUT)
        group.close()
        state = await trainer.state()
        assert (state.is_paused, state.is_torn, state.weight_version) == (True, False, "default")  # nothing has come
        await trainer.update(tensors.items(), "right", BUCKET)
        await trainer.resume()
        assert (await greedy(client))[0] == greedy_of(served.new)


async def test_a_replica_that_dies_answers_again_after_the_next_update(served: Served) -> None:
    children = served.server.children
    if "scheduler-1" not in children:
        pytest.skip("needs replicas")
    tensors = read_checkpoint(served.new)
    async with trainer_of(served) as (client, trainer):
        await trainer.update(tensors.items(), "new", BUCKET)
        expected, _ = await greedy(client)
        os.kill(children["rank-1-0"], signal.SIGKILL)
        await until(lambda: served.server.get("/health")[0] == 503)
        with suppress(CommandError):  # it may not have been noticed yet
            await trainer.update(tensors.items(), "while it is away", BUCKET)
            await trainer.resume()
        await until(lambda: "waits for an update" in served.server.get("/health")[1])
        for _ in range(2):
            assert (await greedy(client))[0] == expected  # of the other replica
        await trainer.update(tensors.items(), "again", BUCKET)
        await until(lambda: served.server.get("/health")[0] == 200)
        for _ in range(2):
            await trainer.reset_prefix_cache()
            assert (await greedy(client))[0] == expected
        served.server.children = list_children(served.server.process.pid)
