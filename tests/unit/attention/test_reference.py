"""The reference backend equals attention computed token by token from the definition, however rows are grouped."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.drivers.paged_rows import make_batch
from toka_async.attention.base import AttentionBackend, AttentionBatch, PrefixGroup, QueryKeyNorm
from toka_async.attention.blocks import TileLimits
from toka_async.attention.invariant.by_token import TokenAttention
from toka_async.attention.kv_cache import CacheFormat, KVCache, LayerScales
from toka_async.attention.reference import ReferenceAttention

CPU = torch.device("cpu")
GROUPED = TileLimits(shared_bytes=0)
ALONE = TileLimits(shared_bytes=1 << 60)
TINY = TileLimits(slab_bytes=1, small_bytes=1, shared_bytes=0, mask_cells=1, kept_cells=0)
DIM = 4


class Case:
    """Random rows over one cache: groups of decoding rows with a shared prefix, single rows, chunks of prompts."""

    def __init__(
        self,
        seed: int,
        page_size: int,
        kv_heads: int,
        group_size: int,
        groups: list[tuple[int, int]],
        contexts: list[int],
        chunks: list[tuple[int, int]],
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.page_size, self.kv_heads, self.heads = page_size, kv_heads, kv_heads * group_size
        rng = np.random.default_rng(seed)
        rows: list[tuple[list[int], int, int]] = []
        self.num_pages = 1
        prefix_groups: list[PrefixGroup] = []
        for num_rows, num_pages in groups:
            shared = self._new_pages(num_pages)
            prefix_groups.append(PrefixGroup(len(rows), num_rows, num_pages))
            for _ in range(num_rows):
                own = int(rng.integers(1, 3 * page_size + 1))
                rows.append((shared + self._new_pages(-(-own // page_size)), num_pages * page_size + own, 1))
        rows += [(self._new_pages(-(-context // page_size)), context, 1) for context in contexts]
        num_decode = len(rows)
        for before, count in chunks:
            rows.append((self._new_pages(-(-(before + count) // page_size)), before + count, count))
        self.rows = rows
        self.batch: AttentionBatch = make_batch(rows, num_decode, page_size, tuple(prefix_groups))
        self.cache = KVCache(1, self.num_pages, kv_heads, page_size, DIM, torch.float32, CPU)
        self.cache.keys[0].copy_(self._normal(*self.cache.keys[0].shape))
        self.cache.values[0].copy_(self._normal(*self.cache.values[0].shape))
        tokens = len(self.batch.write_indices)
        self.projected = 2 * self._normal(tokens, self.heads + 2 * kv_heads, DIM)
        angles = 3 * self._normal(tokens, 1, DIM // 2)
        self.rotation = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
        self.norm = QueryKeyNorm(self._normal(self.heads + kv_heads, DIM), 1e-6) if seed % 2 else None
        self.sinks = 4 * self._normal(self.heads) if seed % 3 == 2 else None

    def _new_pages(self, count: int) -> list[int]:
        self.num_pages += count
        return list(range(self.num_pages - count, self.num_pages))[::-1]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def attend(self, window: int, limits: TileLimits | None) -> Tensor:
        backend = ReferenceAttention(self.cache, self.heads, (window,), limits=limits)
        return self.attend_with(backend)

    def attend_with(self, backend: AttentionBackend) -> Tensor:
        backend.plan(self.batch)
        return backend.attend(0, self.projected, self.rotation, self.norm, self.sinks)

    def rotated(self) -> Tensor:
        """Queries and keys, normed and turned as complex numbers: [tokens, heads + kv_heads, dim]."""
        heads = self.projected[:, : self.heads + self.kv_heads]
        if self.norm is not None:
            rms = (heads.square().mean(-1, keepdim=True) + self.norm.eps).sqrt()
            heads = heads / rms * self.norm.weight
        cos, sin = (factor[..., DIM // 2 :] for factor in self.rotation)
        turned = torch.complex(*torch.split(heads, DIM // 2, -1)) * torch.complex(cos, sin)
        return torch.cat([turned.real, turned.imag], -1)

    def flat_cache(self, cache: Tensor) -> Tensor:
        """Keys or values in the order of write indices: [pages * page_size, kv_heads, dim]."""
        return cache.transpose(1, 2).flatten(0, 1)

    def expected(self, window: int) -> Tensor:
        """Softmax attention of every query over the keys that it may see, read from the cache one by one."""
        outputs = []
        queries = self.rotated()[:, : self.heads]
        token = 0
        for pages, context, count in self.rows:
            places = [(pages[p // self.page_size], p % self.page_size) for p in range(context)]
            keys = torch.stack([self.cache.keys[0][page, :, offset] for page, offset in places])
            values = torch.stack([self.cache.values[0][page, :, offset] for page, offset in places])
            keys, values = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (keys, values))
            for position in range(context - count, context):
                seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
                scores = torch.einsum("hd,lhd->hl", queries[token], keys[seen]) * DIM**-0.5
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks[:, None]], 1)
                shares = scores.softmax(-1)[:, : position + 1 - seen.start]
                outputs.append(torch.einsum("hl,lhd->hd", shares, values[seen]))
                token += 1
        return torch.stack(outputs)


cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    page_size=st.sampled_from([1, 2, 5, 16]),
    kv_heads=st.integers(1, 3),
    group_size=st.sampled_from([1, 3, 5]),
    groups=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), max_size=3),
    contexts=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    chunks=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 25)), max_size=3),
)


@settings(max_examples=30, deadline=None)
@given(case=cases, window=st.sampled_from([0, 0, 1, 7, 30]), limits=st.sampled_from([None, GROUPED, ALONE, TINY]))
def test_equals_the_definition(case: Case, window: int, limits: TileLimits | None) -> None:
    output = case.attend(window, limits)
    torch.testing.assert_close(output, case.expected(window), atol=2e-5, rtol=1e-5)


def test_sinks_count_once_in_two_parts_and_in_one() -> None:
    case = Case(2, 5, 2, 3, [(4, 3)], [9, 30], [(7, 5)])
    outputs = [case.attend(30, limits) for limits in (GROUPED, ALONE)]
    outputs.append(case.attend_with(TokenAttention(case.cache, case.heads, (30,))))
    for output in outputs:
        torch.testing.assert_close(output, case.expected(30), atol=2e-5, rtol=1e-5)
    case.sinks = None
    assert not torch.allclose(case.expected(30), outputs[0], atol=1e-3)


@settings(max_examples=20, deadline=None)
@given(case=cases)
def test_writes_rotated_keys_and_plain_values(case: Case) -> None:
    keys, values = case.cache.keys[0], case.cache.values[0]
    expected_keys, expected_values = case.flat_cache(keys).clone(), case.flat_cache(values).clone()
    expected_keys[case.batch.write_indices] = case.rotated()[:, case.heads :]
    expected_values[case.batch.write_indices] = case.projected[:, case.heads + case.kv_heads :]
    case.attend(0, None)
    torch.testing.assert_close(case.flat_cache(keys), expected_keys)
    assert torch.equal(case.flat_cache(values), expected_values)


@pytest.mark.parametrize("limits", [GROUPED, ALONE])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_cache_in_e4m3_equals_one_of_the_numbers_that_it_stands_for(limits: TileLimits, by_token: bool) -> None:
    case = Case(1, 5, 2, 3, [(4, 3)], [9, 30], [(7, 5)])
    shape = 1, case.num_pages, 2, 5, DIM
    scales = LayerScales(0.375, 5.0)
    stored = KVCache(*shape, torch.float32, CPU, stored=CacheFormat(torch.float8_e4m3fn, (scales,)))
    for target, source in zip(stored.keys + stored.values, case.cache.keys + case.cache.values, strict=True):
        target.copy_(source)

    if by_token:
        output = case.attend_with(TokenAttention(stored, case.heads, (30,)))
    else:
        output = case.attend_with(ReferenceAttention(stored, case.heads, (30,), limits=limits))
    case.cache = KVCache(*shape, torch.float32, CPU)
    places = case.cache.keys[0], case.cache.values[0]
    written = case.rotated()[:, case.heads :], case.projected[:, case.heads + case.kv_heads :]
    of_layer = zip(places, (stored.keys[0], stored.values[0]), written, scales, strict=True)
    for place, numbers, new, scale in of_layer:
        place.copy_(numbers.float() * scale)
        now = case.flat_cache(place)[case.batch.write_indices]
        torch.testing.assert_close(now, new, atol=scale * 2**-10, rtol=2**-4)  # E4M3 has three bits after the first
    torch.testing.assert_close(output, case.expected(30), atol=2e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(case=cases, window=st.sampled_from([0, 7]), limits=st.sampled_from([None, GROUPED, ALONE, TINY]))
def test_numbers_that_a_row_does_not_have_do_not_reach_it(case: Case, window: int, limits: TileLimits | None) -> None:
    """Those of the last row, which has NaN, and of pages that had some before."""
    expected = case.attend(window, limits)
    places = [
        pages[position // case.page_size] * case.page_size + position % case.page_size
        for pages, context, _ in case.rows[:-1]
        for position in range(context)
    ]
    is_owned = torch.zeros(case.num_pages * case.page_size, dtype=torch.bool)
    is_owned[torch.tensor(places, dtype=torch.int64)] = True
    per_page = is_owned.view(case.num_pages, 1, case.page_size, 1)
    for stored in (case.cache.keys[0], case.cache.values[0]):
        stored.masked_fill_(~per_page, torch.nan)
    own = case.rows[-1][2]
    case.projected[-own:] = torch.nan
    output = case.attend(window, limits)
    assert torch.equal(output[:-own], expected[:-own])
    assert output[-own:].isnan().all()


def test_a_cache_knows_whether_it_is_finite() -> None:
    case = Case(0, 4, 1, 1, [], [9, 5], [])
    for value, known in ((0.0, True), (torch.inf, False), (0.0, False)):
        case.projected[0, -1, 0] = value
        case.attend(0, None)
        assert case.cache.is_finite is known
    case.cache.release()
    case.cache.restore()
    assert case.cache.is_finite is True


@settings(max_examples=30, deadline=None)
@given(case=cases, window=st.sampled_from([0, 100]))
def test_grouped_equals_ungrouped(case: Case, window: int) -> None:
    torch.testing.assert_close(case.attend(window, GROUPED), case.attend(window, ALONE), atol=1e-5, rtol=1e-5)


def test_groups_are_taken_in_two_parts() -> None:
    case = Case(0, 16, 1, 2, [(4, 3), (2, 2)], [9], [])
    grouped = ReferenceAttention(case.cache, 2, (0, 40, 1000), limits=GROUPED)
    grouped.plan(case.batch)
    plan, windowed = grouped.plans[0], grouped.plans[40]
    assert plan.grouped is not None
    assert plan.grouped.tolist() == [0, 1, 2, 3, 4, 5]
    assert [block.tokens.tolist() for block in plan.prefix if block.tokens is not None] == [[4, 5], [0, 1, 2, 3]]
    assert windowed.grouped is None or 0 not in windowed.grouped  # its prefix is not wholly in the window
    assert grouped.plans[1000] is plan


def test_a_small_group_is_not_worth_a_merge() -> None:
    case = Case(0, 4, 1, 1, [(2, 1)], [], [])
    backend = ReferenceAttention(case.cache, 1, (0,))
    backend.plan(case.batch)
    assert backend.plans[0].grouped is None


def test_the_smallest_group_is_worth_it_and_no_smaller_one() -> None:
    for less in (0, 1):
        case = Case(0, 4, 1, 1, [(16, 70)], [], [])
        page_bytes = 2 * case.cache.keys[0][0].numel() * 4
        backend = ReferenceAttention(case.cache, 1, (0,), limits=TileLimits(shared_bytes=15 * 70 * page_bytes - 1))
        assert backend.find_smallest_group() == (16, 70 * 4)
        smaller = replace(case.batch, groups=(PrefixGroup(0, 16, 70 - less),))
        backend.plan(smaller)
        assert (backend.plans[0].grouped is None) == bool(less)


def test_a_group_must_leave_each_row_its_newest_token() -> None:
    case = Case(0, 4, 1, 1, [(2, 2)], [], [])
    wrong = replace(case.batch, groups=(PrefixGroup(0, 2, 6),))
    with pytest.raises(AssertionError, match="newest token"):
        ReferenceAttention(case.cache, 1, (0,)).plan(wrong)


def test_a_window_reads_only_its_pages() -> None:
    case = Case(0, 4, 1, 1, [], [40, 41], [])
    backend = ReferenceAttention(case.cache, 1, (6,))
    backend.plan(case.batch)
    (block,) = backend.plans[6].whole
    assert len(block.slices) == 2 * 3  # rows times pages that the last six tokens touch, at most


def test_rows_of_one_length_need_no_mask() -> None:
    case = Case(0, 16, 2, 3, [], [37, 37, 37], [])
    backend = ReferenceAttention(case.cache, 6, (0,))
    backend.plan(case.batch)
    (block,) = backend.plans[0].whole
    assert (block.ends, block.bias, block.first, block.last) == (None, None, 0, 37)
    torch.testing.assert_close(case.attend_with(backend), case.expected(0), atol=2e-5, rtol=1e-5)


def test_rows_of_very_different_length_are_not_padded_to_the_longest() -> None:
    case = Case(0, 1, 1, 1, [], [400, *[5] * 30], [])
    backend = ReferenceAttention(case.cache, 1, (0,), limits=TileLimits(small_bytes=1))
    backend.plan(case.batch)
    assert sorted(len(block.slices) for block in backend.plans[0].whole) == [150, 400]


def test_slabs_bound_what_is_gathered() -> None:
    case = Case(0, 2, 1, 1, [], [20] * 9, [])
    page_bytes = 2 * 2 * DIM * 4
    backend = ReferenceAttention(case.cache, 1, (0,), limits=TileLimits(slab_bytes=40 * page_bytes))
    backend.plan(case.batch)
    assert [block.size for block in backend.plans[0].whole] == [4, 4, 1]
    torch.testing.assert_close(case.attend_with(backend), case.expected(0), atol=2e-5, rtol=1e-5)


def test_a_long_chunk_is_cut() -> None:
    case = Case(0, 16, 1, 2, [], [], [(10, 90)])
    backend = ReferenceAttention(case.cache, 2, (0,), limits=TileLimits(mask_cells=2 * 100 * 20, slab_bytes=1))
    backend.plan(case.batch)
    assert sorted(block.last for block in backend.plans[0].whole) == [32, 64, 80, 96, 112]
    torch.testing.assert_close(case.attend_with(backend), case.expected(0), atol=2e-5, rtol=1e-5)


def test_a_chunk_reads_what_another_row_writes_in_the_same_step() -> None:
    case = Case(0, 4, 1, 1, [], [], [(0, 8), (8, 3)])
    table, (first, second) = case.batch.page_table, case.batch.slots
    table[second, :2] = table[first, :2]
    case.rows[1] = (table[second].tolist(), *case.rows[1][1:])
    output = case.attend(0, None)
    torch.testing.assert_close(output, case.expected(0), atol=1e-5, rtol=1e-5)


def test_no_rows() -> None:
    case = Case(0, 4, 1, 1, [], [3], [])
    none = torch.zeros(0, dtype=torch.int64)
    no_lengths = np.zeros(0, np.int32)
    case.batch = AttentionBatch(0, no_lengths, no_lengths, none.int(), none, case.batch.page_table, none)
    case.projected, case.rotation = case.projected[:0], (case.rotation[0][:0], case.rotation[1][:0])
    backend = ReferenceAttention(case.cache, 1, (0,))
    assert case.attend_with(backend).shape == (0, 1, DIM)


def test_scale() -> None:
    case = Case(0, 4, 1, 1, [], [9], [])
    backend = ReferenceAttention(case.cache, 1, (0,), scale=0.0)
    output = case.attend_with(backend)
    pages = torch.tensor(case.rows[0][0])
    values = case.cache.values[0][pages, 0].reshape(-1, DIM)[:9]
    torch.testing.assert_close(output[0, 0], values.mean(0))
