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
    assert spent == [0.0] * 4 + [1.0] * 8
    assert [int(batch.context_lengths.max()) for batch in part.batches] == [17, 4112, 300, 640] * 3
    assert [len(batch.slots) for batch in part.batches] == [2, 2, 2, 20] * 3
    try_chunks(cache, 4, part)
    assert [batch.num_decode for batch in part.batches[12:]] == [0, 0]


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize("window", [0, 512])
def test_trying_out_compiles_every_kernel(kv_heads: int, window: int) -> None:
    """With and without skipped keys, blocks for short rows, and several parts: some odd step would do so otherwise."""
    pytest.importorskip("triton")
    from toka_async.attention.triton import TritonDecode

    seen: set[tuple[bool, bool, bool]] = set()

    class Planned(TritonDecode):
        def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:  # noqa: ARG002
            step = self.rows.step
            assert step is not None
            seen.add((step.skip is not None, step.config.num_warps == 1, len(step.work.merged) > 0))

    cache = KVCache(1, 2, kv_heads, PAGE, 8, torch.bfloat16, torch.device("cpu"))
    part = Planned(cache, 32)
    part.rows.programs = [max(2, 32 // kv_heads)] * 2  # at most what a multiprocessor runs, at least what any chip does
    try_decode(cache, 32, part, max_seqs=8192, window=window)
    assert len(seen) == 8


@pytest.mark.parametrize(("window", "is_split"), [(0, True), (2000, True), (512, False)])
@pytest.mark.parametrize("programs", [2, 3, 33, 264])
def test_trying_out_splits_chunks_over_keys(programs: int, window: int, is_split: bool) -> None:
    """Unless no window is that long."""
    pytest.importorskip("triton")
    from toka_async.attention.triton import TritonChunks

    seen: list[bool] = []

    class PlannedChunks(TritonChunks):
        def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:  # noqa: ARG002
            assert self.step is not None
            seen.append(len(self.step.merged) > 0)

    cache = KVCache(1, 2, 2, PAGE, 8, torch.bfloat16, torch.device("cpu"))
    part = PlannedChunks(cache, 32)
    part.programs = programs
    try_chunks(cache, 32, part, window=window)
    assert seen == [False, is_split]
