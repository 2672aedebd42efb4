from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.drivers.direct import World, direct_server, runs, wait_for_runs
from tests.drivers.until import SECONDS, until
from tests.fakes.scheduler import FakeScheduler
from tests.processes.cuttable import Cuttable
from toka_async.client import ConnectionLostError, Pool, ReplicaLostError, RequestError, SyncPool
from toka_async.client import pool_replica as pauses
from toka_async.messages import Cancels, Submits

PROMPT = [1, 2, 3]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(pauses, "REST", 0.01)


async def open_servers(stack: AsyncExitStack, count: int, *, held: bool = False) -> list[World]:
    return [await stack.enter_async_context(direct_server(FakeScheduler(held=held))) for _ in range(count)]


def seeds_of(world: World) -> list[int]:
    seeds = [memoryview(each.seeds).cast("B").cast("q") for each in world.scheduler.log if isinstance(each, Submits)]
    return [seed for part in seeds for seed in part]


async def test_requests_of_every_kind_are_answered_by_many_replicas() -> None:
    async with AsyncExitStack() as stack:
        worlds = await open_servers(stack, 3)
        pool = await stack.enter_async_context(Pool([world.url for world in worlds], timeout=SECONDS))
        results = await pool.generate_many([[i, 2] for i in range(60)], n=2, max_tokens=4, text=False)
        assert [sample.token_ids.size for result in results for sample in result.samples] == [4] * 120
        assert (await pool.generate("the answer", max_tokens=3)).samples[0].text
        num_tokens = 0
        async for event in pool.stream(PROMPT, n=2, max_tokens=5, text=False):
            num_tokens += event.token_ids.size
        assert num_tokens == 10
        with pytest.raises(RequestError) as caught:
            await pool.generate(PROMPT, temperature=9.0)
        assert caught.value.field == "temperature"
        await until(lambda: all(replica.is_connected for replica in pool.replicas))
        await pool.generate_many([[i, 3] for i in range(60)], max_tokens=2, text=False)
        assert all(runs(world.scheduler) for world in worlds)
        assert sum(runs(world.scheduler) for world in worlds) == 122
        assert [replica.samples for replica in pool.replicas] == [0, 0, 0]


async def test_a_replica_has_at_most_so_many_samples_and_pulls_the_next() -> None:
    async with AsyncExitStack() as stack:
        (world,) = await open_servers(stack, 1, held=True)
        pool = await stack.enter_async_context(Pool(world.url, max_samples=4))
        calls = asyncio.create_task(pool.generate_many([[i] for i in range(5)], n=2, max_tokens=1, text=False))
        await wait_for_runs(world.scheduler, 2)
        assert pool.replicas[0].samples == 4
        await wait_for_runs(world.scheduler, 5)
        world.scheduler.held = False
        world.scheduler.step()
        assert len(await calls) == 5


async def test_the_server_says_how_many_samples_it_runs_at_once() -> None:
    async with AsyncExitStack() as stack:
        (world,) = await open_servers(stack, 1, held=True)
        pool = await stack.enter_async_context(Pool([world.url]))
        ready = world.engine.ready
        assert ready is not None
        calls = asyncio.create_task(pool.generate_many([PROMPT] * 9 * ready.max_seqs, max_tokens=1, text=False))
        await until(lambda: pool.replicas[0].samples)
        assert ready.max_seqs <= pool.replicas[0].samples <= 1.25 * ready.max_seqs + 1
        calls.cancel()
        await asyncio.wait([calls])


async def test_what_a_lost_replica_had_begins_again_elsewhere_with_the_same_seed() -> None:
    async with AsyncExitStack() as stack:
        second = await stack.enter_async_context(direct_server(FakeScheduler(held=True)))
        async with direct_server(FakeScheduler(held=True)) as first:
            urls = [first.url]
            pool = await stack.enter_async_context(Pool(lambda: urls, timeout=SECONDS, refresh=0.01))
            calls = asyncio.create_task(
                pool.generate_many([[i] for i in range(7)], seeds=range(7), max_tokens=300, text=False)
            )
            stream = pool.stream(PROMPT, max_tokens=300, text=False)
            begun = asyncio.create_task(anext(stream))
            await wait_for_runs(first.scheduler, 8)
            first.scheduler.step()
            assert (await begun).token_ids.size
            urls.append(second.url)
        with pytest.raises(ReplicaLostError, match="middle of a stream"):
            async for _ in stream:
                pass
        await wait_for_runs(second.scheduler, 7)
        second.scheduler.held = False
        second.scheduler.step()
        async with asyncio.timeout(SECONDS):
            assert len(await calls) == 7
        assert sorted(seeds_of(second)) == list(range(7))
        assert pool.num_late == 0


async def test_a_connection_that_breaks_loses_nothing() -> None:
    async with (
        direct_server(FakeScheduler(held=True)) as world,
        Cuttable(world.url) as cuttable,
        Pool([cuttable.url]) as pool,
    ):
        calls = asyncio.create_task(pool.generate_many([[i] for i in range(5)], max_tokens=2, text=False))
        await wait_for_runs(world.scheduler, 5)
        cuttable.cut()
        world.scheduler.held = False
        world.scheduler.step()
        async with asyncio.timeout(SECONDS):
            assert len(await calls) == 5
        assert runs(world.scheduler) == 5


async def test_a_request_loses_so_many_replicas_and_no_more() -> None:
    async with AsyncExitStack() as stack:
        address = "tcp://127.0.0.1:*"
        pool: Pool | None = None
        call: asyncio.Task[object] | None = None
        for _ in range(3):
            async with direct_server(FakeScheduler(held=True), bind=address) as world:
                address = world.url
                if pool is None:
                    pool = await stack.enter_async_context(Pool([address], max_lost=2))
                    call = asyncio.create_task(pool.generate(PROMPT, max_tokens=400, text=False))
                await wait_for_runs(world.scheduler, 1)
        assert call is not None
        with pytest.raises(ReplicaLostError, match="lost 3 replicas"):
            await call


async def test_replicas_come_and_go_by_a_file_and_those_that_go_finish(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second = await open_servers(stack, 2, held=True)
        file = tmp_path / "replicas"
        file.write_text(f"# ours\n{first.url}  # the first\n\n")
        pool = await stack.enter_async_context(Pool(file, refresh=0.01))
        old = asyncio.create_task(pool.generate(PROMPT, max_tokens=100, text=False))
        await wait_for_runs(first.scheduler, 1)
        file.write_text(second.url)
        await until(lambda: [each.url for each in pool.replicas if each.is_connected] == [second.url])
        new = asyncio.create_task(pool.generate(PROMPT, max_tokens=2, text=False))
        await wait_for_runs(second.scheduler, 1)
        for world in (first, second):
            world.scheduler.held = False
            world.scheduler.step()
        await asyncio.gather(old, new)
        assert (runs(first.scheduler), runs(second.scheduler)) == (1, 1)
        await until(lambda: not pool._draining)
        file.unlink()  # the last list stays
        await pool.generate(PROMPT, max_tokens=2, text=False)


async def test_a_silent_replica_that_leaves_the_list_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers goes on, however long its requests take."""
    monkeypatch.setattr(pauses, "SILENCE", 0.3)
    async with AsyncExitStack() as stack:
        off, slow, other = await open_servers(stack, 3, held=True)
        proxy = await stack.enter_async_context(Cuttable(off.url))
        urls = [proxy.url]
        pool = await stack.enter_async_context(Pool(lambda: urls, refresh=0.01))
        first = asyncio.create_task(pool.generate([1], seed=1, max_tokens=2, text=False))
        await wait_for_runs(off.scheduler, 1)
        urls[:] = [slow.url]
        await until(lambda: [each.url for each in pool.replicas if each.is_connected] == urls)
        second = asyncio.create_task(pool.generate([2], seed=2, max_tokens=2, text=False))
        await wait_for_runs(slow.scheduler, 1)
        proxy.silence()
        urls[:] = [other.url]
        await wait_for_runs(other.scheduler, 1)
        assert seeds_of(other) == [1]
        for world in (slow, other):
            world.scheduler.held = False
            world.scheduler.step()
        await asyncio.gather(first, second)
        assert runs(slow.scheduler) == runs(other.scheduler) == 1


async def test_a_cancelled_call_makes_room() -> None:
    async with AsyncExitStack() as stack:
        (world,) = await open_servers(stack, 1, held=True)
        pool = await stack.enter_async_context(Pool([world.url], max_samples=1))
        first = asyncio.create_task(pool.generate([1], max_tokens=400, text=False))
        second = asyncio.create_task(pool.generate([2], max_tokens=400, text=False))
        await wait_for_runs(world.scheduler, 1)
        first.cancel()
        await wait_for_runs(world.scheduler, 2)
        await until(lambda: any(isinstance(message, Cancels) for message in world.scheduler.log))
        second.cancel()
        await asyncio.wait([first, second])
        assert pool.replicas[0].samples == 0


async def test_a_replica_that_is_full_rests_and_the_request_goes_on() -> None:
    async with direct_server(max_requests=2) as world, Pool([world.url]) as pool:
        results = await pool.generate_many([[i] for i in range(40)], max_tokens=2, text=False)
        assert len(results) == 40


async def test_nobody_answers() -> None:
    dead = "tcp://127.0.0.1:9"
    with pytest.raises(ConnectionLostError, match=r"any of 2 replicas, such as .*nobody listens there"):
        async with Pool([dead, "tcp://127.0.0.1:10"]):
            pass
    with pytest.raises(ConnectionLostError, match="there are no replicas"):
        async with Pool([]):
            pass
    with pytest.raises(ConnectionLostError, match="cannot be found"):
        async with Pool("/no/such/file"):
            pass
    with pytest.raises(ConnectionLostError, match="any of 1 replicas"):
        async with Pool(["nonsense"]):
            pass
    async with direct_server() as world, Pool([dead, world.url]) as pool:
        await pool.generate(PROMPT, max_tokens=2, text=False)


async def test_before_and_after_the_context_there_is_an_error() -> None:
    async with direct_server(FakeScheduler(held=True)) as world:
        pool = Pool([world.url])
        for _ in range(2):
            with pytest.raises(ConnectionLostError, match="with"):
                await pool.generate(PROMPT)
            async with pool:
                call = asyncio.create_task(pool.generate(PROMPT))
                await asyncio.sleep(0)
            with pytest.raises(ConnectionLostError, match="closed"):
                await call


async def test_the_same_without_asyncio() -> None:
    async with AsyncExitStack() as stack:
        urls = [world.url for world in await open_servers(stack, 2)]

        def use() -> None:
            with SyncPool(urls) as pool:
                assert len(pool.generate_many([PROMPT] * 9, max_tokens=2, text=False)) == 9
                assert list(pool.stream(PROMPT, max_tokens=2, text=False))

        await asyncio.to_thread(use)
