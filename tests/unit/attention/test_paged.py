"""Attention in parts over our own kernels equals the reference backend, planned step by step or once for a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

pytest.importorskip("triton")

from tests.drivers.paged_rows import make_batch
from toka_async.attention.base import AttentionBackend, AttentionBatch, PrefixGroup, QueryKeyNorm
from toka_async.attention.blocks import TileLimits
from toka_async.attention.invariant.by_token import TokenAttention
from toka_async.attention.kv_cache import CacheFormat, KVCache, LayerScales
from toka_async.attention.paged import PagedAttention
from toka_async.attention.reference import ReferenceAttention
from toka_async.attention.triton import TritonChunks, TritonDecode
from toka_async.attention.wide.pages import WideLimits, WidePages
from toka_async.kernels.prefill import PrefillConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = 60 if DEVICE.type == "cuda" else 2  # the interpreter is slow
ALONE = TileLimits(shared_bytes=1 << 60)
DIM = 16
SCALED = CacheFormat(torch.float8_e4m3fn, (LayerScales(0.5, 2.0), LayerScales(3.0, 0.25)))
WIDE_TILES = PrefillConfig(16, 32, num_warps=4, num_stages=1)


class Case:
    """Rows with private and shared random pages: groups of (rows, pages, own tokens of each), alone, chunks."""

    def __init__(
        self,
        seed: int,
        page_size: int,
        groups: Sequence[tuple[int, int]],
        contexts: Sequence[int],
        chunks: Sequence[tuple[int, int]],
        windows: tuple[int, ...] = (0,),
        num_sms: int = 1,
        stored: CacheFormat | None = None,
        wide: WideLimits | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.num_pages = 1
        rows: list[tuple[list[int], int, int]] = []
        prefixes: list[PrefixGroup] = []
        for num_rows, num_pages in groups:
            shared = self._new_pages(num_pages * page_size, page_size)
            prefixes.append(PrefixGroup(len(rows), num_rows, num_pages))
            for own in rng.integers(1, page_size + 2, num_rows).tolist():
                rows.append((shared + self._new_pages(own, page_size), num_pages * page_size + own, 1))
        rows += [(self._new_pages(context, page_size), context, 1) for context in contexts]
        num_decode = len(rows)
        rows += [(self._new_pages(before + n, page_size), before + n, n) for before, n in chunks]
        self.batch = make_batch(rows, num_decode, page_size, tuple(prefixes), DEVICE)
        self.kv_heads, self.heads, self.windows = 2, 6, windows
        self.stored = stored
        self.cache = self._make_cache(page_size)
        self.wide: WidePages | None = None
        if wide is not None:
            self.wide = WidePages(self.cache.keys, self.cache.values, torch.float32, self.heads, WIDE_TILES, wide)
        for tensor in self.cache.keys + self.cache.values:
            tensor.copy_(self._normal(*tensor.shape))
        self.norm = QueryKeyNorm(self._normal(self.heads + self.kv_heads, DIM), 1e-6) if seed % 2 else None
        self.sinks = 4 * self._normal(self.heads) if seed % 2 else None
        self.soft_cap = 1.5 if seed % 3 == 1 else 0.0
        self.backend = PagedAttention(self.cache, self.heads, windows, self._decode, self._chunks)
        self.num_sms = num_sms
        for decode in self.backend.decodes.values():
            assert isinstance(decode, TritonDecode)
            decode.num_sms = num_sms
            decode.rows.programs = [num_sms, num_sms]

    def check(self, batch: AttentionBatch, graph: bool = False) -> None:
        """All layers of a step, and what they leave in the cache; with a graph's plan, or after a plan of the batch."""
        cache = self.cache
        other = self._make_cache(cache.page_size)
        for target, source in zip(other.keys + other.values, cache.keys + cache.values, strict=True):
            target.copy_(source)
        reference = ReferenceAttention(other, self.heads, self.windows, limits=ALONE, soft_cap=self.soft_cap)
        reference.plan(batch)
        if not graph:
            self.backend.plan(batch)
        for layer in range(len(self.windows)):
            tokens = len(batch.write_indices)
            heads = 2 * self._normal(tokens, self.heads + 2 * self.kv_heads, DIM)
            angles = self._normal(tokens, 1, DIM // 2)
            rotation = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
            output = self.backend.attend(layer, heads, rotation, self.norm, self.sinks)
            expected = reference.attend(layer, heads, rotation, self.norm, self.sinks)
            torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)
        for actual, exact in zip(cache.keys + cache.values, other.keys + other.values, strict=True):
            torch.testing.assert_close(actual.float(), exact.float(), atol=1e-5, rtol=1e-5)

    def _make_cache(self, page_size: int) -> KVCache:
        shape = len(self.windows), self.num_pages, 2, page_size, DIM
        return KVCache(*shape, torch.float32, DEVICE, stored=self.stored)

    def _decode(self) -> TritonDecode:
        return TritonDecode(self.cache, self.heads, soft_cap=self.soft_cap, wide=self.wide)

    def _chunks(self) -> TritonChunks:
        return TritonChunks(self.cache, self.heads, soft_cap=self.soft_cap, wide=self.wide)

    def _new_pages(self, num_tokens: int, page_size: int) -> list[int]:
        count = -(-num_tokens // page_size)
        self.num_pages += count
        return list(range(self.num_pages - count, self.num_pages))[::-1]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE)


def decode_part(case: Case) -> TritonDecode:
    part = case.backend.decodes[case.windows[0]]
    assert isinstance(part, TritonDecode)
    return part


@pytest.mark.parametrize("windows", [(0,), (7, 0), (1000, 25)])
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 1000),
    page_size=st.sampled_from([1, 5, 16]),
    groups=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), max_size=2),
    contexts=st.lists(st.integers(1, 30), max_size=1),
    chunks=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 7)), max_size=1),
    num_sms=st.sampled_from([1, 3]),
)
def test_equals_the_reference(
    windows: tuple[int, ...],
    seed: int,
    page_size: int,
    groups: list[tuple[int, int]],
    contexts: list[int],
    chunks: list[tuple[int, int]],
    num_sms: int,
) -> None:
    if not (groups or contexts or chunks):
        contexts = [3]
    case = Case(seed, page_size, groups, contexts, chunks, windows, num_sms)
    case.check(case.batch)


def test_queries_alone_read_what_another_layer_wrote() -> None:
    case = Case(1, 5, [(3, 2)], [9], [(12, 7)], (7,))
    backends: list[AttentionBackend] = [case.backend]
    backends.append(ReferenceAttention(case.cache, case.heads, case.windows))
    backends.append(TokenAttention(case.cache, case.heads, case.windows))
    tokens = len(case.batch.write_indices)
    heads = case._normal(tokens, case.heads + 2 * case.kv_heads, DIM)
    angles = case._normal(tokens, 1, DIM // 2)
    rotation = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    assert case.norm is not None
    norm = QueryKeyNorm(case.norm.weight[: case.heads], case.norm.eps)
    for backend in backends:
        backend.plan(case.batch)
        whole = backend.attend(0, heads, rotation, case.norm)
        before = [tensor.clone() for tensor in (case.cache.keys[0], case.cache.values[0])]
        alone = backend.attend(0, heads[:, : case.heads].contiguous(), rotation, norm)
        torch.testing.assert_close(alone, whole, atol=1e-6, rtol=1e-6)
        assert torch.equal(case.cache.keys[0], before[0])
        assert torch.equal(case.cache.values[0], before[1])


@pytest.mark.parametrize("windows", [(0, 0), (7, 0)])
@pytest.mark.parametrize("contexts", [[9], [9, 700]])
def test_a_cache_in_e4m3_equals_the_reference(windows: tuple[int, ...], contexts: list[int]) -> None:
    """With other scales in each layer; what is stored is the same."""
    case = Case(1, 5, [(3, 2)], contexts, [(12, 7)], windows, 3, SCALED)
    case.check(case.batch)
    case.check(replace(case.batch, groups=()))


@pytest.mark.parametrize("is_wide", [True, False])
def test_wide_pages(is_wide: bool) -> None:
    """The first group has too few rows; of the others, those that fit, and chunks that fit, read wide pages."""
    limits = WideLimits(1000 if is_wide else 10, least_reads=12, least_rows=4)
    case = Case(1, 5, [(2, 2), (4, 2), (5, 3)], [7], [(12, 7), (3, 30)], (0, 0), 3, SCALED, limits)
    case.check(case.batch)
    shared, chunks = decode_part(case).shared, case.backend.chunks[0]
    assert shared is not None
    assert (shared.num_programs, shared.num_wide) == ((1, 2) if is_wide else (2, 1))
    assert isinstance(chunks, TritonChunks)
    assert chunks.step is not None
    assert (chunks.step.sources is not None) == is_wide
    case.check(replace(case.batch, groups=case.batch.groups[1:2]))
    shared = decode_part(case).shared
    assert shared is not None
    assert (shared.num_programs, shared.num_wide) == (0, 1)
    case.check(replace(case.batch, groups=()))


def test_a_window_over_wide_pages() -> None:
    """Prefixes are widened where every row sees them, chunks are not."""
    case = Case(3, 5, [(4, 2), (5, 3)], [7], [(12, 7), (3, 30)], (15, 15), 3, SCALED, WideLimits(1000, 12, 4))
    case.check(case.batch)
    shared, chunks = decode_part(case).shared, case.backend.chunks[15]
    assert shared is not None
    assert (shared.num_programs, shared.num_wide) == (0, 1)
    assert isinstance(chunks, TritonChunks)
    assert chunks.step is not None
    assert chunks.step.sources is None


def test_chunks_in_parts_over_wide_pages() -> None:
    case = Case(3, 16, [], [], [(2000, 10)], (0, 0), 1, SCALED, WideLimits(least_reads=12))
    chunks = case.backend.chunks[0]
    assert isinstance(chunks, TritonChunks)
    chunks.programs = 8
    case.check(case.batch)
    assert chunks.step is not None
    assert chunks.step.sources is not None
    assert len(chunks.step.merged) == 10


@pytest.mark.parametrize("num_sms", [1, 8])
def test_many_splits(num_sms: int) -> None:
    case = Case(1, 16, [(2, 10)], [], [], num_sms=num_sms)
    case.check(case.batch)
    shared = decode_part(case).shared
    assert shared is not None
    assert (shared.splits > 1) == (num_sms > 1)


def test_a_prefix_is_read_once() -> None:
    """Other rows of the group are not told of the shared pages, and do not need them."""
    case = Case(0, 4, [(3, 2)], [], [])
    broken = case.batch.page_table.clone()
    broken[case.batch.slots[1:3], :2] = 0
    heads = case._normal(3, 10, DIM)
    rotation = torch.ones((3, 1, DIM), device=DEVICE), torch.zeros((3, 1, DIM), device=DEVICE)
    case.backend.plan(case.batch)
    expected = case.backend.attend(0, heads, rotation)
    case.backend.plan(replace(case.batch, page_table=broken))
    assert torch.equal(case.backend.attend(0, heads, rotation), expected)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("window", [0, 23])
def test_one_plan_serves_all_replays_of_a_graph(window: int, grouped: bool) -> None:
    """Rows, lengths and groups change in place; a window that some rows outgrow holds for those."""
    case = Case(1, 5, [(2, 4), (2, 2)], [28], [], (window,))
    batch = case.batch
    static = replace(
        batch,
        context_lengths=np.zeros(len(batch.slots), np.int32),
        slots=batch.slots.clone(),
        contexts=batch.contexts.clone(),
        write_indices=batch.write_indices.clone(),
        groups=(),
    )
    case.backend.plan_graph(static, grouped)
    if grouped:
        case.backend.set_groups(batch.groups)
    case.check(batch, graph=True)
    order = torch.tensor([4, 3, 2, 1, 0], device=DEVICE)
    for name in ("slots", "contexts", "write_indices"):
        getattr(static, name).copy_(getattr(batch, name)[order])
    if grouped:
        case.backend.set_groups((PrefixGroup(1, 2, 2),))
    case.check(replace(static, context_lengths=batch.context_lengths[order.cpu().numpy()]), graph=True)


def test_graphs_of_wide_pages() -> None:
    """Replays have groups whose prefixes are widened beside others, only the one kind or the other, and none."""
    case = Case(3, 5, [(2, 2), (4, 2), (5, 3)], [7], [], (0, 0), 3, SCALED, WideLimits(100, 12, 4))
    batch = case.batch
    case.backend.plan_graph(batch, grouped=True)
    shared = decode_part(case).shared
    assert shared is not None
    assert shared.num_wide >= 2
    for groups in (batch.groups, batch.groups[1:], batch.groups[:1], (), batch.groups):
        case.backend.set_groups(groups)
        assert bool(shared.wide_tiles[0, 0]) == (len(groups) > 1)
        case.check(batch, graph=True)


def test_graphs_of_few_rows_do_without_wide_pages() -> None:
    case = Case(3, 5, [(2, 2), (4, 2)], [7], [], (0, 0), 3, SCALED, WideLimits(100, 12, least_rows=8))
    case.backend.plan_graph(case.batch, grouped=True)
    case.backend.set_groups(case.batch.groups)
    case.check(case.batch, graph=True)
    shared = decode_part(case).shared
    assert shared is not None
    assert shared.num_wide == 0


def test_smaller_graphs_share_the_groups_of_the_largest() -> None:
    case = Case(0, 4, [(3, 2), (2, 3)], [], [])
    case.backend.plan_graph(case.batch, grouped=True)
    smaller = replace(
        case.batch,
        num_decode=3,
        query_lengths=case.batch.query_lengths[:3],
        context_lengths=case.batch.context_lengths[:3],
        slots=case.batch.slots[:3],
        contexts=case.batch.contexts[:3],
        write_indices=case.batch.write_indices[:3],
        groups=case.batch.groups[:1],
    )
    case.backend.set_groups(case.batch.groups)
    case.check(case.batch, graph=True)
    case.backend.plan_graph(smaller, grouped=True)
    case.backend.set_groups(smaller.groups)
    case.check(smaller, graph=True)


def test_groups_that_stay_are_not_sent_again() -> None:
    case = Case(0, 4, [(3, 2)], [], [])
    case.backend.plan_graph(case.batch, grouped=True)
    case.backend.set_groups(case.batch.groups)
    data = decode_part(case).graph_data
    assert data[:3].tolist() == [8, 8, 8]
    data.fill_(-1)
    case.backend.set_groups((PrefixGroup(0, 3, 2),))
    assert data.eq(-1).all()
    case.backend.set_groups(())
    assert data[:3].tolist() == [0, 0, 0]


def test_prefixes_never_need_more_memory_than_was_taken_at_first() -> None:
    """A cache that is sized after the attention was built leaves no room for more."""
    part = decode_part(Case(0, 4, [], [3, 3], [], num_sms=132))
    for num_rows in (1, 2, 40, 8192):
        for num_tiles in (1, 2, 30):
            splits = part._count_prefix_splits(num_tiles, num_rows)
            assert splits == 1 or splits * num_rows * 6 * DIM <= part.memory.most


def test_a_group_must_leave_each_row_its_newest_token() -> None:
    case = Case(0, 4, [(2, 2)], [], [])
    with pytest.raises(AssertionError, match="newest token"):
        case.backend.plan(replace(case.batch, groups=(PrefixGroup(0, 2, 6),)))


def test_groups_out_of_every_window_are_left_out() -> None:
    case = Case(0, 4, [(2, 5), (2, 2)], [], [], windows=(16,))
    case.check(case.batch)
    shared = decode_part(case).shared
    assert shared is not None
    assert shared.skip.tolist() == [0, 0, 8, 8]


def test_chunks_are_cut_into_tiles_longest_first() -> None:
    case = Case(0, 4, [], [5], [(3, 6), (20, 2)])
    part = case.backend.chunks[0]
    assert isinstance(part, TritonChunks)
    part.tile_queries = 4
    part.plan(case.batch, 0)
    assert part.step is not None
    # row, first query, queries, keys that it sees
    assert part.step.tiles.tolist() == [[3, 0, 0, 0], [2, 6, 2, 21], [1, 4, 2, 8], [1, 0, 4, 4]]


@pytest.mark.parametrize("windows", [(0,), (1200,)])
def test_a_few_tokens_after_many_are_split_over_keys(windows: tuple[int, ...]) -> None:
    case = Case(0, 16, [], [], [(1500, 6), (3, 2)], windows)
    for chunks in case.backend.chunks.values():
        assert isinstance(chunks, TritonChunks)
        chunks.programs = 4
    case.check(case.batch)
    part = case.backend.chunks[windows[0]]
    assert isinstance(part, TritonChunks)
    assert part.step is not None
    assert part.step.merged is not None
    assert part.step.merged[:, 0].tolist() == list(range(6))


def test_scale() -> None:
    case = Case(0, 4, [(2, 2)], [9], [(2, 3)])
    case.backend.decodes[0] = TritonDecode(case.cache, 6, scale=0.0)
    case.backend.chunks[0] = TritonChunks(case.cache, 6, scale=0.0)
    case.backend.plan(case.batch)
    tokens = len(case.batch.write_indices)
    rotation = torch.ones((tokens, 1, DIM), device=DEVICE), torch.zeros((tokens, 1, DIM), device=DEVICE)
    output = case.backend.attend(0, case._normal(tokens, 10, DIM), rotation)
    for row, token, length in ((0, 0, int(case.batch.context_lengths[0])), (2, 2, 9), (3, 5, 5)):
        pages = case.batch.page_table[case.batch.slots[row]].long()
        values = case.cache.values[0][pages].transpose(1, 2).flatten(0, 1)[:length]
        torch.testing.assert_close(output[token], values.mean(0).repeat_interleave(3, 0), atol=1e-5, rtol=1e-5)


def test_no_rows() -> None:
    case = Case(0, 4, [], [3], [])
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    no_lengths = np.zeros(0, np.int32)
    case.check(AttentionBatch(0, no_lengths, no_lengths, none.int(), none, case.batch.page_table, none))
