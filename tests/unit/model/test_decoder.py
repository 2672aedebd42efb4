"""Splitting a decoder over ranks changes nothing; what it computes is checked against transformers in tests/parity."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import Tensor

from tests.mean_attention import TOKENS, load, run
from tests.models import make_checkpoint
from toka_async.model.comm import LocalComm, share_of


class ThreadComm:
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, slots: list[Tensor], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self.slots, self.barrier = slots, barrier

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.barrier.wait()
        self.slots[self.rank] = x
        self.barrier.wait()
        return list(self.slots)

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.exchange(x)).sum(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.exchange(x), dim)

    def minimum(self, number: int) -> int:
        return min(int(x) for x in self.exchange(torch.tensor(number)))

    def of_first(self, data: bytes) -> bytes:
        raise AssertionError(f"the model exchanges no data, such as {data!r}")


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("qwen2", 2), ("qwen3", 3), ("mistral", 3)], ids=str)
def test_ranks_together_equal_one(tmp_path: Path, family: str, size: int) -> None:
    folder = make_checkpoint(
        tmp_path,
        family,
        num_key_value_heads=size,
        attention_bias=family in ("llama", "qwen3"),
        mlp_bias=family == "llama",
    )
    alone = run(load(folder, LocalComm()), num_kv_heads=size)
    assert alone.shape == (TOKENS, 261)
    slots, barrier = [torch.empty(0)] * size, Barrier(size, timeout=30)
    decoders = [load(folder, ThreadComm(rank, slots, barrier)) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(run, decoders))
    for logits in ranks:
        torch.testing.assert_close(logits, alone, atol=1e-9, rtol=1e-9)


def test_shares_cover_the_total() -> None:
    comms = [ThreadComm(rank, [torch.empty(0)] * 3, Barrier(1)) for rank in range(3)]
    assert [(share.start, share.size, share.total) for share in (share_of(12, comm) for comm in comms)] == [
        (0, 4, 12),
        (4, 4, 12),
        (8, 4, 12),
    ]
    with pytest.raises(AssertionError, match="13 cannot be split over 3 ranks"):
        share_of(13, comms[0])


def test_alone_nothing_is_exchanged() -> None:
    x = torch.randn(3)
    assert LocalComm().all_reduce(x) is x
    assert LocalComm().all_gather(x, 0) is x
