"""Attention by token equals the definition, and changes no bit when a row is cut or computed beside others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.drivers.paged_rows import make_batch
from tests.unit.attention.test_reference import Case, cases
from toka_async.attention.invariant.by_token import TokenAttention
from toka_async.attention.kv_cache import KVCache

DIM, HEADS, KV_HEADS, PAGE = 12, 6, 2, 5


@settings(max_examples=30, deadline=None)
@given(case=cases, window=st.sampled_from([0, 0, 1, 7, 30]))
def test_it_equals_the_definition(case: Case, window: int) -> None:
    output = case.attend_with(TokenAttention(case.cache, case.heads, (window,)))
    torch.testing.assert_close(output, case.expected(window), atol=2e-5, rtol=1e-5)


def attend_rows(lengths: list[int], heads: Tensor, cuts: list[int], window: int) -> Tensor:
    """The outputs of the first row's tokens, computed up to each of the cuts in turn, beside all of the other rows."""
    tokens = torch.arange(max(lengths))
    angles = tokens[:, None, None] * 0.1 ** torch.arange(DIM // 2)
    rotation = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    counts = [-(-length // PAGE) for length in lengths]
    cache = KVCache(1, sum(counts) + 1, KV_HEADS, PAGE, DIM, torch.float32, torch.device("cpu"))
    attention = TokenAttention(cache, HEADS, (window,))
    pages = [list(range(sum(counts[:row]), sum(counts[: row + 1]))) for row in range(len(lengths))]
    outputs, done = [], 0
    for end in cuts:
        rows = [(pages[0], end, end - done), *((p, n, n) for p, n in zip(pages[1:], lengths[1:], strict=True))]
        attention.plan(make_batch(rows, int(end - done == 1 and len(rows) == 1), PAGE))
        own = torch.cat([tokens[done:end], *(tokens[:length] for length in lengths[1:])])
        mixed = [heads[done:end], *(heads[:n] + row for row, n in enumerate(lengths[1:], 1))]
        output = attention.attend(0, torch.cat(mixed), (rotation[0][own], rotation[1][own]))
        outputs.append(output[: end - done])
        done = end
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [0, 9])
@settings(max_examples=20, deadline=None)
@given(data=st.data(), length=st.integers(1, 60), others=st.lists(st.integers(1, 60), max_size=3))
def test_cuts_and_neighbours_change_no_bit(window: int, data: st.DataObject, length: int, others: list[int]) -> None:
    heads = torch.randn(60, HEADS + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(length))
    alone = attend_rows([length], heads, list(range(1, length + 1)), window)
    cuts = sorted({*data.draw(st.lists(st.integers(1, length), max_size=4)), length})
    assert torch.equal(attend_rows([length, *others], heads, cuts, window), alone)
