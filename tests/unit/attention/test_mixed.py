"""Attention of captured steps with chunks equals the reference backend, for steps that are refilled in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.unit.attention.test_paged import ALONE, DEVICE, DIM, Case
from toka_async.attention import triton
from toka_async.attention.base import AttentionBatch, ChunkRows, ChunkStates
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.mixed import MixedGraphAttention
from toka_async.attention.reference import ReferenceAttention
from toka_async.attention.triton import TritonChunks, TritonDecode


@pytest.fixture(autouse=True)
def few_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs without work take the interpreter's time too."""
    monkeypatch.setattr(triton, "MERGED_QUERIES", 4)


class Graph:
    """The tensors of a captured step of `num_tokens` and `num_rows`, planned once for all steps of a case's cache."""

    def __init__(
        self,
        case: Case,
        num_tokens: int,
        num_rows: int,
        grouped: bool = False,
        attention: MixedGraphAttention | None = None,
    ) -> None:
        self.case = case
        self.attention = attention or MixedGraphAttention(
            case.cache, case.heads, case.windows, case._decode, case._chunks
        )
        self.chunks = torch.zeros(self.attention.count_chunk_cells(num_tokens, num_rows), dtype=torch.int32)
        self.chunks = self.chunks.to(DEVICE)
        table = case.batch.page_table
        self.batch = AttentionBatch(
            num_decode=num_rows,
            query_lengths=np.ones(num_rows, np.int32),
            context_lengths=np.ones(num_rows, np.int32),
            contexts=torch.zeros(num_rows, dtype=torch.int32, device=DEVICE),
            slots=torch.zeros(num_rows, dtype=torch.int64, device=DEVICE),
            page_table=table,
            write_indices=torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE),
        )
        self.attention.plan_mixed(self.batch, grouped, self.chunks)
        self.grouped = grouped

    def fill(self, batch: AttentionBatch) -> None:
        split, behind = batch.num_decode, slice(batch.num_decode, None)
        self.batch.contexts.zero_()
        self.batch.contexts[:split] = batch.contexts[:split]
        self.batch.slots.zero_()
        self.batch.slots[: len(batch.slots)] = batch.slots
        self.batch.write_indices.zero_()  # the first page is nobody's
        self.batch.write_indices[: len(batch.write_indices)] = batch.write_indices
        cells = np.zeros(len(self.chunks), np.int32)
        lengths, contexts = batch.query_lengths[behind], batch.context_lengths[behind].astype(np.int64)
        chunks = ChunkRows(
            len(self.batch.write_indices), self.batch.num_decode, split, lengths, contexts, ChunkStates(lengths)
        )
        self.attention.describe_chunks(cells, chunks)
        self.chunks.copy_(torch.from_numpy(cells))
        if self.grouped:
            self.attention.set_groups(batch.groups)

    def check(self, batch: AttentionBatch) -> None:
        """All layers of a step, and what they leave in the cache."""
        case, tokens, size = self.case, len(batch.write_indices), len(self.batch.write_indices)
        cache = case.cache
        other = KVCache(len(case.windows), case.num_pages, 2, cache.page_size, DIM, torch.float32, DEVICE)
        for target, source in zip(other.keys + other.values, cache.keys + cache.values, strict=True):
            target.copy_(source)
        reference = ReferenceAttention(other, case.heads, case.windows, limits=ALONE, soft_cap=case.soft_cap)
        reference.plan(batch)
        self.fill(batch)
        for layer in range(len(case.windows)):
            heads = case._normal(size, case.heads + 2 * case.kv_heads, DIM)
            angles = case._normal(size, 1, DIM // 2)
            rotation = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
            output = self.attention.attend(layer, heads, rotation, case.norm, case.sinks)
            own = heads[:tokens], (rotation[0][:tokens], rotation[1][:tokens])
            expected = reference.attend(layer, *own, case.norm, case.sinks)
            torch.testing.assert_close(output[:tokens], expected, atol=2e-5, rtol=1e-5)
        for actual, exact in zip(cache.keys + cache.values, other.keys + other.values, strict=True):
            torch.testing.assert_close(actual[1:], exact[1:], atol=1e-5, rtol=1e-5)


def make_part(batch: AttentionBatch, rows: Sequence[int]) -> AttentionBatch:
    """The batch of some of the rows, in order."""
    ends = np.cumsum(batch.query_lengths)
    tokens = np.concatenate([np.arange(ends[row] - batch.query_lengths[row], ends[row]) for row in rows])

    def take(values: Tensor, indices: Sequence[int]) -> Tensor:
        return values[torch.tensor(indices, device=DEVICE)]

    return replace(
        batch,
        num_decode=sum(row < batch.num_decode for row in rows),
        query_lengths=batch.query_lengths[list(rows)],
        context_lengths=batch.context_lengths[list(rows)],
        contexts=take(batch.contexts, rows),
        slots=take(batch.slots, rows),
        write_indices=take(batch.write_indices, tokens.tolist()),
        groups=batch.groups if len(rows) == len(batch.query_lengths) else (),
    )


@pytest.mark.parametrize(("windows", "num_sms"), [((0,), 64), ((7, 0), 1)])
def test_one_plan_serves_steps_of_all_kinds(windows: tuple[int, ...], num_sms: int) -> None:
    """Chunks alone, decoding rows alone, both: with few programs for a row's keys and many; and room to spare."""
    case = Case(1, 5, [], [28, 1, 9], [(0, 7), (20, 3)], windows)
    graph = Graph(case, 24, 8)
    for decode in graph.attention.decodes.values():
        assert isinstance(decode, TritonDecode)
        decode.rows.programs = [num_sms] * 2
    graph.attention.plan_mixed(graph.batch, False, graph.chunks)
    for rows in ([3], [0, 1, 2, 3, 4], [0, 1], [2, 4]):
        graph.check(make_part(case.batch, rows))


def test_a_step_may_fill_the_graph() -> None:
    case = Case(0, 4, [], [6], [(0, 1), (3, 2)])
    Graph(case, 4, 3).check(case.batch)


@pytest.mark.parametrize("window", [0, 23])
def test_groups_come_and_go(window: int) -> None:
    case = Case(1, 5, [(2, 4), (2, 2)], [8], [(6, 3)], (window,))
    graph = Graph(case, 12, 7, grouped=True)
    graph.check(case.batch)
    graph.check(replace(case.batch, groups=()))
    graph.check(case.batch)


def test_there_may_be_more_tiles_than_programs() -> None:
    """The first programs take a second one."""
    case = Case(0, 4, [], [2], [(0, 9), (5, 8), (1, 1)])
    graph = Graph(case, 32, 4)
    for chunks in graph.attention.chunks.values():
        assert isinstance(chunks, TritonChunks)
        chunks.tile_queries = 4
        assert chunks.step is not None
        chunks.step = replace(chunks.step, num_programs=2)
    graph.check(case.batch)
    assert graph.chunks[0] == 6


@pytest.mark.parametrize(("window", "tokens"), [(0, 4), (1200, 4), (0, 5)])
def test_few_tokens_after_many_are_split_over_keys(window: int, tokens: int) -> None:
    """Where the graph has room for their parts, of 4 queries; and then a step in which no tile is split."""
    case = Case(0, 16, [], [3], [(1500, tokens), (2, 2)], (window,))
    graph = Graph(case, 8, 4)
    for chunks in graph.attention.chunks.values():
        assert isinstance(chunks, TritonChunks)
        chunks.programs = 4
    graph = Graph(case, 8, 4, attention=graph.attention)
    graph.check(case.batch)
    assert graph.chunks[0] == (3 if tokens == 4 else 2)
    graph.check(make_part(case.batch, [0, 2]))
    assert graph.chunks[0] == 1


def test_nothing_is_planned_step_by_step() -> None:
    case = Case(0, 4, [], [2], [])
    with pytest.raises(AssertionError, match="only graphs"):
        Graph(case, 4, 3).attention.plan(case.batch)
