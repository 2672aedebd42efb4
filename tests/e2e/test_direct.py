from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.pools import run_fakes, run_servers
from tests.drivers.until import until
from tests.processes.cuttable import Cuttable
from tests.processes.serving import Serving, free_port, serving
from toka_async.client import Client, RequestError, SyncClient

QUESTION = "Question: Wei has 26 apples. Ivan has 2 times as many. How many do they have together?\nAnswer:"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, str]]:
    url = f"tcp://127.0.0.1:{free_port()}"
    with serving(tmp_path_factory.mktemp("direct"), f"zmq.bind={url}", "zmq.credit=64") as server:
        yield server, url


async def wait_until_idle(server: Serving) -> None:
    await until(lambda: not server.metric("num_requests_running") and not server.metric("kv_cache_usage_perc"))


def test_the_same_answer_as_over_http(running: tuple[Serving, str]) -> None:
    server, url = running
    _, answer = server.post("/v1/completions", prompt=QUESTION, max_tokens=100, seed=3, return_token_ids=True)
    (choice,) = answer["choices"]
    with SyncClient(url) as client:
        (sample,) = client.generate(QUESTION, max_tokens=100, seed=3).samples
    assert sample.text == choice["text"]
    assert sample.token_ids.tolist() == choice["token_ids"]
    assert sample.finish_reason == choice["finish_reason"]


async def test_streams_and_many_samples_beyond_the_credit(running: tuple[Serving, str]) -> None:
    _, url = running
    async with Client(url) as client:
        results = await client.generate_many([[i, i + 1, 2] for i in range(200)], n=2, max_tokens=5, ignore_eos=True)
        assert {sample.token_ids.size for result in results for sample in result.samples} == {5}
        whole = await client.generate(QUESTION, max_tokens=40, seed=1, n=5)
        texts = [""] * 5
        async for event in client.stream(QUESTION, max_tokens=40, seed=1, n=5):
            texts[event.sample] += event.text
        assert texts == [sample.text for sample in whole.samples]


async def test_cancelled_requests_cost_nothing_more(running: tuple[Serving, str]) -> None:
    server, url = running
    async with Client(url) as client:
        task = asyncio.create_task(client.generate([1, 2, 3], n=8, max_tokens=1900, ignore_eos=True, text=False))
        async with contextlib.aclosing(client.stream([1, 2], max_tokens=1900, ignore_eos=True, text=False)) as events:
            await anext(events)
        task.cancel()
        await wait_until_idle(server)


async def test_refused_input_names_its_field(running: tuple[Serving, str]) -> None:
    _, url = running
    async with Client(url) as client:
        with pytest.raises(RequestError) as caught:
            await client.generate(QUESTION, top_p=7.0)
        assert caught.value.field == "top_p"


async def test_a_broken_connection_costs_nothing(running: tuple[Serving, str]) -> None:
    server, url = running
    before = server.metric('request_success_total{finished_reason="length"}')
    async with Cuttable(url) as cuttable, Client(cuttable.url) as client:

        async def cut() -> None:
            await until(lambda: server.metric("num_requests_running"))
            for number in range(2, 5):
                cuttable.cut()
                await until(lambda: cuttable.num_connections == number)  # noqa: B023

        cutting = asyncio.create_task(cut())
        calls = [client.generate([i], max_tokens=150, ignore_eos=True, text=i % 2 == 0) for i in range(40)]
        results = await asyncio.gather(*calls)
        await cutting
        assert {result.samples[0].token_ids.size for result in results} == {150}
        assert cuttable.num_connections == 4
    assert server.metric('request_success_total{finished_reason="length"}') - before == 40, "each ran once"


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["zmq.bind=tcp://0.0.0.0:10211"], "zmq.key"),
        (["zmq.bind=tcp://*:10211"], "zmq.key"),
        (["zmq.bind=10211"], "tcp://HOST:PORT"),
        (["zmq.bind=tcp://127.0.0.1:10211", "zmq.key=x"], "zmq.clients"),
    ],
)
def test_a_public_address_without_keys_is_refused(overrides: list[str], part: str) -> None:
    command = [sys.executable, "-m", "toka_async.cli", "serve", "server.port=0", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert part in done.stderr


# ---- many servers, whose replicas are killed under load; `scripts/measure_pool.py` does the same for longer


async def test_real_servers_are_killed_and_every_request_ends_once(tmp_path: Path, socket_folders: Path) -> None:
    del socket_folders
    tally = await run_servers(tmp_path, num_requests=20_000, num_kills=2)
    assert (tally.ends, tally.wrong, tally.kills, tally.late) == (20_000, 0, 2, 0)
    assert tally.broken < 2000


async def test_a_tenth_of_many_replicas_is_replaced_and_every_request_ends_once() -> None:
    tally = await run_fakes(num_replicas=200, num_requests=100_000, num_kills=20)
    assert (tally.ends, tally.wrong, tally.kills, tally.late) == (100_000, 0, 20, 0)
    assert tally.descriptors[0] == tally.descriptors[1]
