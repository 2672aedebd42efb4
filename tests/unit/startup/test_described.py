from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from toka_async.messages import RankDevice
from toka_async.startup import described
from toka_async.startup.described import count_weight_bytes, describe_device
from toka_async.startup.device import name_device


@dataclass
class Cache:
    num_bytes: int
    mapped_bytes: int = 0

    def release(self) -> None:
        raise AssertionError

    def restore(self) -> None:
        raise AssertionError


def test_a_gpu_as_its_driver_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=139 << 30)
    answers = {"get_device_properties": properties, "memory_reserved": 70, "mem_get_info": (20, 100)}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda asked, answer=answer: answer if asked == device else None)
    mapped = [Cache(20, mapped_bytes=22), Cache(5, mapped_bytes=6)]  # torch does not count them
    for caches, used in (([Cache(25)], 70), (mapped, 98)):
        assert describe_device(1, device, "bfloat16", 30, caches) == RankDevice(
            rank=1,
            device="NVIDIA H200 (139 GiB)",
            dtype="bfloat16",
            weights=30,
            cache=25,
            used=used,
            free=20,
            total=100,
        )


def test_a_cpu_whose_cache_is_not_written_to_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(described, "read_available_memory", lambda: 100)
    seen = describe_device(0, torch.device("cpu"), "float32", 30, [Cache(60)])
    assert (seen.device, seen.dtype, seen.used, seen.free) == (name_device(torch.device("cpu")), "float32", 90, 40)
    assert describe_device(0, torch.device("cpu"), "float32", 30, [Cache(160)]).free == 0


def test_shared_weights_count_once() -> None:
    first, second = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
    model = nn.Sequential(first, second)
    assert count_weight_bytes(model) == 2 * 3 * 5 * 4
    second.weight = first.weight
    assert count_weight_bytes(model) == 3 * 5 * 4
    second.weight = nn.Parameter(first.weight.data)  # another object, the same memory
    assert count_weight_bytes(model) == 3 * 5 * 4
