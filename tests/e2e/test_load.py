"""Many clients at once: all are answered, alike where that was asked for; those who leave cost nothing afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.drivers.until import until
from tests.processes.serving import Serving, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("load"), "cache.num_tokens=131072") as running:
        yield running


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
    )


@pytest.mark.parametrize("number", [500, pytest.param(8192, marks=pytest.mark.slow)])
async def test_all_are_answered(server: Serving, number: int) -> None:
    async def ask(session: aiohttp.ClientSession, index: int) -> tuple[int, int]:
        body = {"model": "demo", "prompt": f"Question: {index}", "max_tokens": 8, "ignore_eos": True}
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            return response.status, (await response.json())["usage"]["completion_tokens"]

    async with client() as session:
        answers = await asyncio.gather(*(ask(session, index) for index in range(number)))
    assert Counter(answers) == {(200, 8): number}


@pytest.mark.parametrize("number", [200, pytest.param(2000, marks=pytest.mark.slow)])
async def test_clients_that_leave_at_random_leave_nothing(server: Serving, number: int) -> None:
    chance = random.Random(0)

    async def leave(session: aiohttp.ClientSession, index: int, seconds: float) -> None:
        body = {"model": "demo", "prompt": f"Question: {index}", "max_tokens": 1900, "stream": index % 2 == 0}
        try:
            async with asyncio.timeout(seconds):
                async with session.post(f"{server.url}/v1/completions", json=body | {"ignore_eos": True}) as response:
                    await response.read()
        except TimeoutError:
            return
        pytest.fail(f"client {index} was answered before it left")

    async with client() as session:
        await asyncio.gather(*(leave(session, index, chance.uniform(0, 3)) for index in range(number)))
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    await until(lambda: not any(server.metric(name) for name in names))


ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--net"]  # needs no privileges, where the system allows it


def can_make_networks() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "ip", "link"], capture_output=True, timeout=10, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_make_networks(), reason="this system allows no user namespaces, or has no unshare or ip")
def test_a_client_that_vanishes_is_noticed_and_its_request_cancelled() -> None:
    command = [*NAMESPACE, sys.executable, "-m", "tests.processes.half_open"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0], "without the listener's options nobody notices"


NAMES = ("Wei", "Ivan", "Emma", "Jack", "Ben", "Aisha", "Tom", "Olga")
PROMPTS = [f"Question: {name} has {i + 3} apples. {name} gets {7 * i} more." for i, name in enumerate(NAMES)]
TIGHT = ("schedule.max_tokens=32", "schedule.max_seqs=24", "cache.num_tokens=1280")  # chunks, and no room for all


def ask(server: Serving, index: int) -> list[Any]:
    status, answer = server.post(
        "/v1/completions",
        model="demo",
        prompt=PROMPTS[index],
        seed=index,
        temperature=1.0,
        max_tokens=40,
        n=3,
        logprobs=2,
        echo=index % 2 == 0,
        return_token_ids=True,
    )
    assert status == 200, answer
    return [(choice["token_ids"], choice["text"], choice["logprobs"]) for choice in answer["choices"]]


@pytest.mark.usefixtures("socket_folders")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((*TIGHT, "parallel.tp=2"), id="tp"),
        pytest.param(("parallel.pp=2",), id="pp", marks=pytest.mark.slow),
    ],
)
def test_batch_invariant_answers_do_not_depend_on_the_load(tmp_path: Path, options: tuple[str, ...]) -> None:
    with serving(tmp_path, "model.batch_invariant=true", *options) as server:
        alone = [ask(server, index) for index in range(len(PROMPTS))]
        with ThreadPoolExecutor(3 * len(PROMPTS)) as pool:
            together = list(pool.map(lambda index: ask(server, index % len(PROMPTS)), range(3 * len(PROMPTS))))
    for index, answers in enumerate(together):
        assert answers == alone[index % len(PROMPTS)]
