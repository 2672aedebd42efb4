from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.drivers.until import wait_until
from tests.processes.serving import Serving, serving

QUESTION = "Question: Wei has 26 apples. Ivan has 2 times as many. How many do they have together?\nAnswer:"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("serve")) as running:
        yield running


def test_says_what_it_serves_and_where(server: Serving) -> None:
    assert server.line.startswith("toka-async: serving demo at http://127.0.0.1:")
    assert set(server.children) == {"server", "scheduler-0", "rank-0-0"}
    assert server.get("/health")[0] == 200


def test_a_completion(server: Serving) -> None:
    status, answer = server.post("/v1/completions", model="demo", prompt=QUESTION, max_tokens=100, temperature=0)
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "####" in answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] > 10


def test_a_cache_in_fp8(server: Serving, tmp_path: Path) -> None:
    """It takes a quarter of one in float32, and the answer is the same."""
    asked = {"model": "demo", "prompt": QUESTION, "max_tokens": 100, "temperature": 0}
    with serving(tmp_path, "cache.dtype=fp8") as small:
        _, answer = small.post("/v1/completions", **asked)
        assert "float32, cache in fp8" in small.errors.read_text()
        sizes = [read_cache_bytes(each) for each in (server, small)]
    assert answer["choices"][0]["text"] == server.post("/v1/completions", **asked)[1]["choices"][0]["text"]
    assert sizes[0] == 4 * sizes[1] > 0


def read_cache_bytes(server: Serving) -> float:
    lines = server.get("/metrics")[1].splitlines()
    (line,) = (line for line in lines if line.startswith("toka:replica_kv_cache_bytes{"))
    return float(line.split()[-1])


def test_streamed_text_is_the_same_text(server: Serving) -> None:
    asked = {"model": "demo", "prompt": QUESTION, "max_tokens": 100, "seed": 5, "n": 3, "temperature": 1.5}
    _, whole = server.post("/v1/completions", **asked)
    texts = {0: "", 1: "", 2: ""}
    for event in server.stream("/v1/completions", **asked):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert len(set(texts.values())) > 1


def test_a_chat(server: Serving) -> None:
    message = {
        "role": "user",
        "content": "Wei has 26 apples. Ivan has 2 times as many. How many do they have together?",
    }
    status, answer = server.post("/v1/chat/completions", model="demo", messages=[message], max_tokens=100)
    assert status == 200
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_many_at_once(server: Serving) -> None:
    def ask(number: int) -> int:
        return server.post("/v1/completions", model="demo", prompt=QUESTION, n=2, max_tokens=8 + number)[0]

    with ThreadPoolExecutor(32) as pool:
        assert set(pool.map(ask, range(64))) == {200}


def test_a_client_that_leaves_costs_nothing_more(server: Serving) -> None:
    events = server.stream("/v1/completions", model="demo", prompt=QUESTION, n=8, max_tokens=1900, ignore_eos=True)
    next(events)
    wait_until(lambda: server.metric("num_requests_running") == 8 and server.metric("kv_cache_usage_perc") > 0)
    events.close()
    wait_until(lambda: server.metric("num_requests_running") == 0 and server.metric("kv_cache_usage_perc") == 0)


@pytest.mark.parametrize("arguments", [[QUESTION], ["Ana has 12 pens. How many pens has she?", "--chat"]])
def test_ping(server: Serving, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "toka_async.cli", "ping", *arguments, "--max-tokens", "60", "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n")
    assert done.stdout.strip()
    assert not done.stderr


def test_errors_are_of_the_apis_shape(server: Serving) -> None:
    status, body = server.get("/nowhere")
    assert status == 404
    assert json.loads(body)["error"]["message"]
    status, answer = server.post("/v1/completions", model="demo", prompt="x", temperature=-1)
    assert status == 400
    assert answer["error"]["param"] == "temperature"


def test_idle_processes_sleep(server: Serving) -> None:
    def states() -> set[str]:
        stats = [stat for pid in server.pids for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}

    wait_until(lambda: states() == {"S"}, states)
