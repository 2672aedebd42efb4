"""When products may overlap with what ranks exchange; that they are right is checked with processes (test_comm.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drivers.thread_ranks import run_ranks
from toka_async.model import overlap
from toka_async.model.comm import Comm
from toka_async.model.matrices.matrix import Rows
from toka_async.model.overlap import OverlappedShards, explain_obstacle, reserve

CPU = torch.device("cpu")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What these say: multicast (device indices that would use it), linked (pairs that read each other's memory)."""
    gpus = SimpleNamespace(multicast=set(), linked={(4, 5), (5, 4)})
    monkeypatch.setenv(overlap.NO_MULTICAST, "1")
    monkeypatch.setattr(overlap, "_has_multicast", lambda device: device.index in gpus.multicast)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) in gpus.linked)
    return gpus


def test_without_plain_weights_nothing_overlaps() -> None:
    """Rows are gathered with their scales, and sums scattered, apart from the products."""
    x, scales = torch.arange(12.0).view(4, 3), torch.arange(1.0, 5.0).view(4, 1)

    def of_rank(comm: Comm) -> list[Tensor]:
        own = slice(2 * comm.rank, 2 * comm.rank + 2)
        rows = Rows(x[own], scales[own])
        matrix: Any = Scaled()
        layout = OverlappedShards(comm, fail, fail)
        gated = layout.gated(rows, matrix, "silu", matrix)
        added, _ = layout.row(Rows(x, scales), matrix, x)
        assert added is not None
        return [layout.column(rows, matrix), gated.values, added[:2]]

    for rank, (product, gated, added) in enumerate(run_ranks(2, of_rank)):
        assert torch.equal(product, x * scales)
        assert torch.equal(gated, x * scales + 1)
        assert torch.equal(added, 2 * (x * scales)[2 * rank : 2 * rank + 2] + 5)


class Scaled:
    """A matrix whose product is its rows, scaled."""

    plain = None
    bias = torch.tensor(5.0)

    def product(self, rows: Rows, with_bias: bool = True) -> Tensor:
        assert rows.scales is not None
        return rows.values * rows.scales + (0 * self.bias if with_bias else 0)

    def gated(self, rows: Rows, activation: str, consumer: Scaled) -> Rows:
        assert (activation, consumer) == ("silu", self)
        return Rows(self.product(rows) + 1)


def fail(x: Tensor, weight: Tensor) -> Tensor:
    raise AssertionError((x, weight))


def reasons() -> list[str]:
    return run_ranks(2, lambda comm: explain_obstacle(comm, torch.device("cuda", 4 + comm.rank)))


@pytest.mark.usefixtures("two_gpus")
def test_linked_gpus_without_multicast_can() -> None:
    assert reasons() == ["", ""]
    assert run_ranks(2, lambda comm: explain_obstacle(comm, CPU)) == ["it needs GPUs"] * 2


def test_multicast_must_be_off(two_gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    off = "NVLink's multicast is not switched off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1)"
    two_gpus.multicast.add(5)
    assert reasons() == ["another rank's GPU cannot", off]
    two_gpus.multicast.clear()
    monkeypatch.setenv(overlap.NO_MULTICAST, "0")
    assert reasons() == [off, off]
    monkeypatch.delenv(overlap.NO_MULTICAST)
    assert reasons() == [off, off]


def test_gpus_must_be_linked(two_gpus: SimpleNamespace) -> None:
    two_gpus.linked.remove((5, 4))
    assert reasons() == ["another rank's GPU cannot", "GPUs cannot read each other's memory"]


def test_ranks_agree_on_memory_that_one_of_them_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserved(comm: Comm) -> str:
        def workspace(group: str, num_bytes: int) -> None:
            assert (group, num_bytes) == ("group", 1 << 20)
            if comm.rank == 1:
                raise RuntimeError("no handle\nsomewhere in C++")

        monkeypatch.setattr(overlap, "_group", lambda _: "group")
        monkeypatch.setattr(overlap, "_symmetric_memory", lambda: SimpleNamespace(get_symm_mem_workspace=workspace))
        return reserve(comm, 1 << 20)

    assert run_ranks(2, reserved) == ["another rank cannot share memory", "no handle"]
