from __future__ import annotations

import os

import pytest
import torch

from toka_async.model.spec import ModelError
from toka_async.runner.devices import VISIBLE, take_gpus


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv(VISIBLE, "")


@pytest.mark.parametrize(
    ("visible", "replica", "num_replicas", "per_replica", "left"),
    [
        ("", 1, 2, 1, "1"),
        ("", 1, 2, 2, "2,3"),
        ("", 3, 4, 1, "3"),
        ("4,5,6,7", 2, 3, 1, "6"),
        ("4,5,6,7", 0, 1, 1, "4,5,6,7"),
    ],
)
def test_each_replica_has_its_own(
    monkeypatch: pytest.MonkeyPatch, visible: str, replica: int, num_replicas: int, per_replica: int, left: str
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    take_gpus(replica, num_replicas, per_replica)
    assert os.environ[VISIBLE] == left


@pytest.mark.parametrize(("num_replicas", "per_replica", "most"), [(5, 1, 4), (3, 2, 2)])
def test_too_few(num_replicas: int, per_replica: int, most: int) -> None:
    with pytest.raises(ModelError, match=rf"^parallel\.dp={num_replicas}: needs .* shows 4; use at most {most}"):
        take_gpus(0, num_replicas, per_replica)


def test_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    take_gpus(1, 2, 1)
    assert not os.environ[VISIBLE]
