"""A replica on several machines: its tokens, the end of a machine, and starts that cannot succeed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.until import wait_until
from tests.processes.clusters import Cluster, ClusterServing, starting
from tests.processes.parallel import OPTIONS, REQUESTS, TIE, Reference, ask_all, make_model
from tests.processes.serving import alive, wait_until_gone

pytestmark = pytest.mark.usefixtures("socket_folders")
SIMULATED = ("model.device=simulated", "simulated.step_ms=5", "log.stats_interval=0")
DEMO = Path(__file__).parents[3] / "toka_async" / "demo"


def stop(cluster: Cluster, server: ClusterServing) -> None:
    """Stop the leader; all machines end with it."""
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_for_all() == 0
    for agent in cluster.agents.values():
        assert agent.wait(60) == 0


@pytest.mark.parametrize(
    ("size", "pp", "tp", "more"),
    [(2, 2, 1, ()), pytest.param(2, 2, 2, ("parallel.pp_micro_batches=2",), marks=pytest.mark.slow)],
)
def test_greedy_tokens_equal_the_reference(tmp_path: Path, size: int, pp: int, tp: int, more: tuple[str, ...]) -> None:
    model = make_model(tmp_path / "model")
    options = (f"model.path={model}", "model.device=cpu", f"parallel.pp={pp}", f"parallel.tp={tp}", *OPTIONS, *more)
    with starting(tmp_path, size, *options) as cluster:
        for index in range(1, size):
            cluster.join(index, *options, "server.port=0", "cache.num_tokens=32768")
        server = ClusterServing(cluster)
        assert set(cluster.ranks_of(1)) == {f"rank-0-{rank}" for rank in range(tp, 2 * tp)}
        answers = ask_all(server, 8)
        stop(cluster, server)
    assert "the leader has stopped" in cluster.said("agent-1")
    reference = Reference(model)
    prompts = [prompt for prompt, num_samples in REQUESTS for _ in range(num_samples)]
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert len(tokens) == 8
        assert reference.gap(prompt, tokens) < TIE


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    """Three machines, one of which is the leader's, that simulate."""
    with starting(tmp_path, 3, *SIMULATED, "parallel.pp=3", "parallel.tp=2") as made:
        yield made


class Request(threading.Thread):
    """A stream, which would run for long unless it is told otherwise."""

    def __init__(self, server: ClusterServing, max_tokens: int = 1900) -> None:
        super().__init__()
        self._body = {"model": "demo", "prompt": "Q", "max_tokens": max_tokens, "ignore_eos": True}
        self._server = server
        self.has_begun = threading.Event()
        self.last: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        for event in self._server.stream("/v1/completions", **self._body):
            self.has_begun.set()
            self.last = event


def ask(server: ClusterServing) -> int:
    return server.post("/v1/completions", model="demo", prompt="Q", max_tokens=3)[0]


def test_a_lost_machine_ends_the_replica_everywhere_until_it_is_back(cluster: Cluster) -> None:
    first, second = cluster.join(1), cluster.join(2)
    server = ClusterServing(cluster)
    requests = [Request(server) for _ in range(4)]
    for request in requests:
        assert request.has_begun.wait(60)
    victims = [first.pid, *cluster.ranks_of(1).values()]
    others = [pid for name, pid in server.children.items() if name.startswith("rank-")] + [
        *cluster.ranks_of(2).values()
    ]
    assert (len(victims), len(others)) == (3, 4)
    first.kill()
    first.wait()
    for request in requests:
        request.join(60)
        assert "node 1 (127.0.0.1, lo) was lost" in request.last["error"]["message"]
    wait_until_gone([*victims, *others])
    assert alive([second.pid, server.process.pid]) == [second.pid, server.process.pid]
    assert server.get("/health")[0] == 503
    assert ask(server) == 503
    cluster.join(1)
    wait_until(lambda: server.get("/health")[0] == 200, cluster.said)
    assert ask(server) == 200
    server.children = {}
    stop(cluster, server)


def test_a_signal_to_all_machines_lets_requests_finish(tmp_path: Path) -> None:
    """As the scheduler of a cluster ends a job. Both replicas have a stage on each machine."""
    with starting(tmp_path, 2, *SIMULATED, "parallel.pp=2", "parallel.dp=2") as cluster:
        agent = cluster.join(1)
        server = ClusterServing(cluster)
        assert set(cluster.ranks_of(1)) == {"rank-0-1", "rank-1-1"}
        requests = [Request(server, 200) for _ in range(4)]
        for request in requests:
            assert request.has_begun.wait(60)
        agent.send_signal(signal.SIGTERM)
        stop(cluster, server)
        for request in requests:
            request.join(60)
            assert request.last["choices"][0]["finish_reason"] == "length"


def test_a_killed_rank_is_started_again_on_its_machine(cluster: Cluster) -> None:
    cluster.join(1)
    cluster.join(2)
    server = ClusterServing(cluster)
    before = cluster.ranks_of(2)
    os.kill(before["rank-0-5"], signal.SIGKILL)
    wait_until(lambda: "replica 0 is back" in cluster.said(), cluster.said)
    assert "rank-0-5 was killed by SIGKILL on node 2 (127.0.0.1, lo)" in cluster.said()
    wait_until(lambda: ask(server) == 200)
    after = cluster.ranks_of(2)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())


def test_a_lost_leader_ends_its_ranks_everywhere_and_its_machines_join_the_next(cluster: Cluster) -> None:
    agents = [cluster.join(index) for index in (1, 2)]
    server = ClusterServing(cluster)
    ranks = [pid for index in (1, 2) for pid in cluster.ranks_of(index).values()]
    server.kill()
    wait_until_gone(ranks)
    assert alive([agent.pid for agent in agents]) == [agent.pid for agent in agents]
    wait_until(lambda: "asking to join again" in cluster.said("agent-1"))
    agents[0].send_signal(signal.SIGTERM)
    assert agents[0].wait(60) == 0


def test_an_agent_ends_with_its_lifeline(cluster: Cluster) -> None:
    read, write = os.pipe()
    first, _ = cluster.join(1, "--lifeline-fd", str(read), inherit=(read,)), cluster.join(2)
    server = ClusterServing(cluster)
    ranks = cluster.ranks_of(1).values()
    for end in (read, write):
        os.close(end)
    assert first.wait(60) == 1
    wait_until_gone(ranks)
    wait_until(lambda: server.get("/health")[0] == 503)


def test_an_agent_that_downloads_the_model_can_be_stopped(tmp_path: Path) -> None:
    """Only the leader has the model where it is said to be. The other one's hub never answers."""
    shutil.copytree(DEMO, tmp_path / "org" / "model")
    (tmp_path / "empty").mkdir()
    here = Path.cwd()
    try:
        with socket.create_server(("127.0.0.1", 0)) as hub:
            port = hub.getsockname()[1]
            environment = {**with_path(here), "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)}
            os.chdir(tmp_path)
            with starting(
                tmp_path, 2, *SIMULATED, "model.path=org/model", "parallel.pp=2", environment=environment
            ) as made:
                os.chdir(tmp_path / "empty")
                agent = made.join(1)
                connection, _ = hub.accept()
                agent.send_signal(signal.SIGTERM)
                assert agent.wait(60) == -signal.SIGTERM
                connection.close()
                wait_until(lambda: "node 1 (127.0.0.1, lo) was lost" in made.said())
    finally:
        os.chdir(here)


def test_another_model_is_refused_on_both_ends(tmp_path: Path) -> None:
    """The same path has other contents: a link within the working folder of each."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        shutil.copytree(DEMO, tmp_path / name / "model")
    config = tmp_path / "two" / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "torch_dtype": "float16"}))
    here = Path.cwd()
    try:
        os.chdir(tmp_path / "one")
        with starting(
            tmp_path, 2, *SIMULATED, "model.path=model", "parallel.pp=2", environment=with_path(here)
        ) as made:
            os.chdir(tmp_path / "two")
            agent = made.join(1)
            assert agent.wait(60) == made.leader.wait(60) == 2
            line = "node 1 (127.0.0.1, lo) cannot join: model.path=model: config.json is "
            lines = made.said("leader").splitlines()
            assert line in [each for each in lines if "node-0:" not in each][-1]  # which may speak after it
            assert line in made.said("agent-1").splitlines()[-1]
    finally:
        os.chdir(here)


def with_path(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (("server.port=7",), {}, "its configuration differs: model.device is auto, and the leader's is simulated"),
        (("--size", "3", "parallel.pp=3"), {}, "it is node 1 of 3, and the leader expects 2 nodes"),
        ((), {"TOKA_CLUSTER_KEY": "0" * 32}, "does not accept this node's key: TOKA_CLUSTER_KEY must be the same"),
    ],
)
def test_an_agent_that_does_not_fit_says_why(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    with starting(tmp_path, 2, *SIMULATED, "parallel.pp=2", environment={"TOKA_CLUSTER_KEY": "1" * 32}) as cluster:
        more = ("parallel.pp=2",) if options and options[0].startswith("server") else ()
        agent = cluster.join(1, *options, *more, environment=environment)
        assert agent.wait(60) == 2
        assert message in cluster.said("agent-1").splitlines()[-1]


def test_a_leader_without_the_others_gives_up(tmp_path: Path) -> None:
    with starting(tmp_path, 2, *SIMULATED, "parallel.pp=2", "cluster.join_timeout=0.5") as cluster:
        assert cluster.leader.wait(60) == 2
        # On a busy machine the leader's own node may be late, too, and speak last.
        assert re.search(r"nodes? (0, )?1 of 2 did not join at tcp://127\.0\.0\.1:", cluster.said())
