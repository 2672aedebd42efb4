"""Data parallelism: replicas answer as one does, and the death of one costs its clients an error at most."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.until import wait_until
from tests.processes.serving import Serving, alive, serving
from toka_async.bench.loads.served import list_children

PROMPTS = [f"Question: Wei has {i} apples. Ivan has 2 times as many. How many in all?\nAnswer:" for i in range(2, 14)]
pytestmark = pytest.mark.usefixtures("socket_folders")
SIMULATED = ("model.device=simulated", "simulated.step_ms=5")


def greedy(server: Serving) -> list[Any]:
    asked = {"model": "demo", "max_tokens": 60, "temperature": 0}
    status, answer = server.post("/v1/completions", prompt=PROMPTS, stop=["####"], n=2, **asked)
    assert status == 200
    return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


def of_replicas(server: Serving, name: str) -> list[float]:
    """A metric of each replica."""
    lines = server.get("/metrics")[1].splitlines()
    return [float(line.split()[1]) for line in lines if line.startswith(f"toka:replica_{name}{{")]


def test_replicas_give_the_answers_of_one(tmp_path: Path) -> None:
    answers = []
    for dp in (1, 3):
        with serving(tmp_path, f"parallel.dp={dp}") as server:
            assert len(server.children) == 1 + 2 * dp
            answers.append(greedy(server))
            wait_until(lambda: all(of_replicas(server, "generation_tokens_total")))
            wait_until(lambda: of_replicas(server, "outstanding_tokens") == [0] * dp)  # noqa: B023
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_for_all() == 0
    assert answers[1] == answers[0]


class Load:
    """Clients that ask one request after the other, whole or streamed, until they are told to stop."""

    def __init__(self, server: Serving, num_clients: int) -> None:
        self.outcomes: list[tuple[bool, bool]] = []  # (streamed, right)
        self._server = server
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(num_clients)
        self._clients = [self._pool.submit(self._ask_on, index) for index in range(num_clients)]

    def wait_for(self, number: int) -> None:
        """Until so many further requests are answered rightly."""
        before = self.num_right
        wait_until(lambda: self.num_right >= before + number)

    @property
    def num_right(self) -> int:
        return sum(right for _, right in self.outcomes)

    def stop(self) -> None:
        self._stop.set()
        for client in self._clients:
            client.result(timeout=60)
        self._pool.shutdown()

    def _ask_on(self, index: int) -> None:
        while not self._stop.is_set():
            body = {"model": "demo", "prompt": PROMPTS[index % 12], "max_tokens": 60, "ignore_eos": True, "n": 2}
            if index % 2:
                right, error = self._streamed(body)
            else:
                status, answer = self._server.post("/v1/completions", **body)
                right = status == 200 and answer["usage"]["completion_tokens"] == 120
                error = answer.get("error")
            assert right or any(text in error["message"] for text in ("has stopped: ", "being restarted: ")), error
            self.outcomes.append((index % 2 == 1, right))
            if not right:
                self._stop.wait(0.02)

    def _streamed(self, body: dict[str, Any]) -> tuple[bool, Any]:
        with self._server._request("POST", "/v1/completions", {**body, "stream": True}) as response:
            lines = response.read().splitlines()
            if response.status != 200:
                return False, json.loads(lines[0])["error"]
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        reasons = [event["choices"][0]["finish_reason"] for event in events if event.get("choices")]
        return reasons.count("length") == 2, events[-1].get("error")


@pytest.mark.parametrize(
    ("victims", "device"),
    [
        (["scheduler-0"], SIMULATED),
        (["rank-0-0", "scheduler-1"], SIMULATED),
        (["rank-0-0"], ()),
    ],
)
def test_a_killed_replica_comes_back(
    tmp_path: Path, socket_folders: Path, victims: list[str], device: tuple[str, ...]
) -> None:
    with serving(tmp_path, "parallel.dp=2", *device) as server:
        load = Load(server, 12)
        load.wait_for(12)
        for victim in victims:
            os.kill(server.children[victim], signal.SIGKILL)
        wait_until(lambda: "is restarted in" in server.said())
        wait_until(lambda: server.said().count(" is back") == len(victims), server.said)
        wait_until(lambda: server.get("/health")[0] == 200)
        first = len(load.outcomes)
        load.wait_for(24)
        load.stop()
        assert all(right for _, right in load.outcomes[first + 12 :])
        if len(victims) == 1:  # those that nobody had seen anything of went to the other replica
            assert all(right for streamed, right in load.outcomes if not streamed)
        old, server.children = server.children, list_children(server.process.pid)
        assert server.children.keys() == old.keys()
        lost = {victim.split("-")[1] for victim in victims}
        assert {name for name, pid in old.items() if not alive([pid])} == {
            name for name in old if name.split("-")[1:2] and name.split("-")[1] in lost
        }
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not alive([*server.pids, *old.values()])
        assert not list(socket_folders.iterdir())


def test_a_replica_lost_while_draining_ends_nobody_elses_requests(tmp_path: Path) -> None:
    with serving(tmp_path, "parallel.dp=2", *SIMULATED) as server, ThreadPoolExecutor() as pool:
        body = {"model": "demo", "max_tokens": 800, "ignore_eos": True}
        answers = [pool.submit(server.post, "/v1/completions", prompt=prompt, **body) for prompt in PROMPTS[:4]]
        wait_until(lambda: server.metric("num_requests_running") == 4)
        running = of_replicas(server, "requests_running")
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "finishing running requests" in server.said())
        os.kill(server.children[f"rank-{running.index(max(running))}-0"], signal.SIGKILL)
        assert [answer.result(timeout=60)[0] for answer in answers] == [200] * 4
        assert server.wait_for_all() == 0
        assert " is back" not in server.said()
