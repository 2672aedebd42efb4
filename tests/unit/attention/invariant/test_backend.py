"""The kernel's attention changes no bit when rows are cut or stand beside others, in steps and in graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from tests.drivers.paged_rows import make_batch
from toka_async.attention.base import PrefixGroup
from toka_async.attention.invariant import backend
from toka_async.attention.invariant.backend import (
    InvariantChunks,
    InvariantDecode,
    build_invariant_attention,
    cut_tiles,
)
from toka_async.attention.invariant.by_token import TokenAttention
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.paged import PagedAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = 60 if DEVICE.type == "cuda" else 3  # the interpreter is slow
DIM, HEADS, KV_HEADS, PAGE = 16, 6, 2, 5
MOST = 30  # tokens of a row


def make_cache() -> KVCache:
    return KVCache(1, 40, KV_HEADS, PAGE, DIM, torch.float32, DEVICE)


def make_paged(cache: KVCache, window: int, soft_cap: float = 0.0) -> PagedAttention:
    return PagedAttention(
        cache,
        HEADS,
        (window,),
        lambda: InvariantDecode(cache, HEADS, 8, soft_cap=soft_cap),
        lambda: InvariantChunks(cache, HEADS, soft_cap=soft_cap),
    )


def make_tokens(positions: list[int], row: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Projected heads and the rotation of a row's tokens, which depend on row and position alone."""
    at = torch.tensor(positions)
    angles = at[:, None, None] * 0.1 ** torch.arange(DIM // 2)
    rotation = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    heads = torch.randn(MOST, HEADS + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(row))[at]
    return heads.to(DEVICE), (rotation[0].to(DEVICE), rotation[1].to(DEVICE))


def run_step(
    attention: PagedAttention | TokenAttention,
    rows: list[tuple[int, int, int]],
    graph: bool = False,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """Attends (row, tokens before, tokens) of each row; those of one token decode and come first."""
    num_decode = sum(count == 1 for _, _, count in rows)
    pages = [list(range(8 * row, 8 * row + 8)) for row, _, _ in rows]
    shapes = [(page, before + count, count) for page, (_, before, count) in zip(pages, rows, strict=True)]
    batch = make_batch(shapes, num_decode, PAGE, device=DEVICE)
    if graph:
        assert isinstance(attention, PagedAttention)
        ones = np.ones(len(rows), dtype=np.int32)
        attention.plan_graph(replace(batch, query_lengths=ones, context_lengths=ones), grouped=False)
    else:
        attention.plan(batch)
    parts = [make_tokens(list(range(before, before + count)), row) for row, before, count in rows]
    cos, sin = (torch.cat([rotation[i] for _, rotation in parts]) for i in (0, 1))
    output = attention.attend(0, torch.cat([heads for heads, _ in parts]), (cos, sin), sinks=sinks)
    return [*torch.split(output, [count for _, _, count in rows])]


@pytest.mark.parametrize("window", [0, 9])
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), length=st.integers(1, 25), others=st.lists(st.integers(1, 12), max_size=2))
def test_cuts_and_neighbours_change_no_bit(window: int, data: st.DataObject, length: int, others: list[int]) -> None:
    """A row that is decoded from its first token on equals one that is computed in chunks, among chunks of others."""
    decoding = make_paged(make_cache(), window)
    alone = torch.cat([run_step(decoding, [(0, done, 1)], graph=True)[0] for done in range(length)])
    beside, done, outputs = make_paged(make_cache(), window), 0, []
    while done < length:
        count = data.draw(st.integers(1, length - done))
        rows = [(0, done, count), *((row, 0, other) for row, other in enumerate(others, 1))]
        rows.sort(key=lambda row: row[2] > 1)
        outputs.append(run_step(beside, rows)[[row for row, _, _ in rows].index(0)])
        done += count
    assert torch.equal(torch.cat(outputs), alone)


@pytest.mark.parametrize(("window", "has_sinks", "soft_cap"), [(0, False, 0.0), (9, False, 0.5), (9, True, 0.0)])
def test_it_equals_attention_by_token(window: int, has_sinks: bool, soft_cap: float) -> None:
    sinks = torch.linspace(-4, 4, HEADS, device=DEVICE) if has_sinks else None
    ours = make_paged(make_cache(), window, soft_cap)
    theirs = TokenAttention(make_cache(), HEADS, (window,), soft_cap=soft_cap)
    for rows in ([(0, 0, 17), (1, 0, 4)], [(0, 17, 1), (1, 4, 6)], [(0, 18, 1), (1, 10, 1)]):
        exact = run_step(theirs, rows, sinks=sinks)
        for output, expected in zip(run_step(ours, rows, sinks=sinks), exact, strict=True):
            torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)


def test_groups_are_not_shared() -> None:
    attention = make_paged(make_cache(), 0)
    batch = make_batch([([0, 1, 2], 13, 1), ([0, 1, 3], 13, 1)], 2, PAGE, device=DEVICE)
    outputs = []
    for groups in ((), (PrefixGroup(0, 2, 2),)):
        attention.plan(replace(batch, groups=groups))
        heads, rotation = make_tokens([12, 12], 0)
        outputs.append(attention.attend(0, heads, rotation))
    assert torch.equal(*outputs)


def test_chunks_are_cut_into_tiles() -> None:
    batch = make_batch([([0], 3, 1), ([1, 2], 9, 5), ([3], 2, 2)], 1, PAGE)
    assert cut_tiles(batch, 3).tolist() == [[1, 0, 3, 5], [1, 3, 2, 8], [2, 5, 2, 1]]


def test_without_kernels_a_token_is_attended_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(1, 4, KV_HEADS, PAGE, DIM, torch.float32, torch.device("cpu"))
    built = build_invariant_attention("auto", cache, HEADS, (0,), 4)
    assert isinstance(built.backend, TokenAttention)
    assert (built.graphs, built.smallest_group, built.pays(1000, 1000)) == (None, (0, 0), False)
    monkeypatch.setattr(backend, "resolve_backend", lambda *_: "triton")
    built = build_invariant_attention("auto", cache, HEADS, (0,), 4)
    assert isinstance(built.backend, PagedAttention)
    assert built.graphs is built.backend
    assert (built.smallest_group, built.pays(1000, 1000)) == ((0, 0), False)
