from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from toka_async.ray.engine import MOST_UNANSWERED, ReplicaEngine, ReplicaStartError, clean_environment

OVERRIDES = ("model.device=simulated", "server.port=0", "zmq.bind=tcp://127.0.0.1:*")


@pytest.fixture
def engine() -> Iterator[ReplicaEngine]:
    running = ReplicaEngine(OVERRIDES)
    try:
        yield running
    finally:
        running.kill()


def test_an_engine_that_hangs_or_ends_is_lost(engine: ReplicaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toka_async.ray.engine.HEALTH_TIMEOUT", 0.2)
    engine.wait_serving()
    assert engine.address.startswith("tcp://127.0.0.1:")
    assert engine.find_problem() is None
    url, engine.url = engine.url, "http://127.0.0.1:1"
    assert [engine.find_problem() for _ in range(MOST_UNANSWERED - 1)] == [None] * (MOST_UNANSWERED - 1)
    assert engine.find_problem() == "the engine has not answered 3 times in a row"
    engine.url = url
    assert engine.find_problem() is None, "it answers again"
    engine.process.send_signal(signal.SIGKILL)
    engine.process.wait()
    assert engine.find_problem() == "the engine ended with exit code -9"


def test_an_engine_that_does_not_start_says_why() -> None:
    engine = ReplicaEngine([*OVERRIDES, "model.path=/no/such/folder"])
    with pytest.raises(ReplicaStartError, match=r"exit code 2\): .*no such directory"):
        engine.wait_serving()


def test_running_requests_may_finish(engine: ReplicaEngine) -> None:
    engine.wait_serving()
    assert engine.drain() == 0


def test_an_engine_has_the_gpus_that_ray_chose_and_nothing_of_its_workers() -> None:
    environment = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "RAY_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert clean_environment(environment, ["2", "3"]) == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert clean_environment(environment, []) == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
