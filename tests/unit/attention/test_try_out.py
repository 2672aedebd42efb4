"""Synthetic batches, and trials that reach everything that a part compiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.fakes.attention_part import FakePart
from toka_async.attention.base import PrefixGroup
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.try_out import TrialShape, make_batch, try_chunks, try_decode

PAGE = 16


def test_a_synthetic_batch() -> None:
    cache = KVCache(1, 100, 1, PAGE, 8, torch.float32, torch.device("cpu"))
    group = PrefixGroup(1, 2, 3)
    batch = make_batch(cache, TrialShape(((40, 1), (70, 1), (80, 1), (33, 20)), 3, (group,)), (group,))
    assert (batch.num_decode, batch.groups) == (3, (group,))
    assert batch.context_lengths.tolist() == batch.contexts.tolist() == [40, 70, 80, 33]
    assert batch.query_lengths.tolist() == [1, 1, 1, 20]
    assert batch.page_table.shape == (4, 5)
    assert torch.equal(batch.page_table[1, :3], batch.page_table[2, :3])
    assert not torch.equal(batch.page_table[1, 3:], batch.page_table[2, 3:])
    assert len(set(batch.page_table.flatten().tolist())) > 10


def test_trying_out_takes_every_path() -> None:
    cache = KVCache(1, 2, 2, PAGE, 8, torch.float32, torch.device("cpu"))
    spent: list[float] = []
    part = FakePart(lambda _, groups: float(len(groups)), spent)
    try_decode(cache, 4, part, max_seqs=20)
    assert spent == [0.0] * 4 + [1.0] * 8 + [0.0]
    assert [int(batch.context_lengths.max()) for batch in part.batches] == [17, 4112, 300, 640] * 3 + [4112]
    assert [len(batch.slots) for batch in part.batches] == [2, 2, 2, 20] * 3 + [20]
    assert part.batches[12].context_lengths.tolist() == [4112] + [17] * 19
    try_chunks(cache, 4, part)
    assert [batch.num_decode for batch in part.batches[13:]] == [0, 0]


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize("window", [0, 512])
def test_trying_out_merges_the_parts_of_few_rows_and_of_many(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, window: int
) -> None:
    """Which are two kernels: a service without large graphs would build one of them at some odd step."""
    pytest.importorskip("triton")
    from toka_async.attention import triton as own
    from toka_async.kernels.decode import MANY_ROWS

    merged: set[bool] = set()

    class Planned(own.TritonDecode):
        def run(self, layer: int, query: Tensor, output: Tensor) -> None:  # noqa: ARG002
            assert self.step is not None
            if self.step.splits.count > 1:
                merged.add(len(query) > MANY_ROWS)

    monkeypatch.setattr(own, "count_sms", lambda _: 132)
    cache = KVCache(1, 2, kv_heads, PAGE, 8, torch.float32, torch.device("cpu"))
    try_decode(cache, 32, Planned(cache, 32), max_seqs=512, window=window)
    assert merged == {False, True}
