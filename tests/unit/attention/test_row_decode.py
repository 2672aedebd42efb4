"""Decoding rows over their own keys equal the definition, planned step by step or once for all replays of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.attention import AttentionCase, make_case
from toka_async.arrays import Int32
from toka_async.attention import row_decode
from toka_async.attention.row_decode import FEW_ROWS, RowDecode
from toka_async.kernels.decode import DecodeConfig, Partial, decode_attention
from toka_async.kernels.decode_work import DecodeWork

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIXED = (3, 700, 1, *(20 + i for i in range(FEW_ROWS)), 290)


def case_of(contexts: Sequence[int]) -> AttentionCase:
    return make_case(0, 16, 2, 2, 16, contexts=contexts, device=DEVICE)


def rows_of(case: AttentionCase, num_programs: int) -> RowDecode:
    rows = RowDecode(case.cache, case.num_heads, case.scale)
    rows.programs = [num_programs, num_programs]
    return rows


def check(rows: RowDecode, case: AttentionCase, window: int = 0) -> None:
    output = torch.full_like(case.query, torch.nan)
    rows.run(0, case.query, output)
    torch.testing.assert_close(output, case.expected(window), atol=2e-5, rtol=1e-5)


def lengths_of(case: AttentionCase, window: int = 0) -> Int32:
    lengths = case.batch.context_lengths
    return np.minimum(lengths, window) if window else lengths


@pytest.mark.parametrize("window", [0, 60])
def test_uneven_rows_start_with_the_longest(window: int) -> None:
    case = case_of([3, 290, 40, 500])
    rows = rows_of(case, 2)
    rows.plan(case.batch, lengths_of(case, window), None, window)
    assert rows.step is not None
    first = rows.step.work.items[0].tolist()
    assert first == ([1, 0, 1] if window else [3, 0, 2])
    check(rows, case, window)


def test_even_rows_that_fill_the_chip_are_not_split() -> None:
    case = case_of([40, 41, 42, 40])
    rows = rows_of(case, 1)
    rows.plan(case.batch, lengths_of(case), None, 0)
    assert rows.step is not None
    assert rows.step.work.items.tolist() == [[2, 0, 1], [1, 0, 1], [0, 0, 1], [3, 0, 1]]
    assert len(rows.step.work.merged) == 0
    check(rows, case)


def test_short_rows_have_small_blocks() -> None:
    """And other numbers of programs at once."""
    case = case_of([40])
    case.cache.dtype = torch.bfloat16
    rows = rows_of(case, 1)
    for length, num_warps in ((399, 1), (401, 2)):
        rows.plan(case.batch, np.array([length]), None, 0)
        assert rows.step is not None
        assert rows.step.config.num_warps == num_warps


def test_one_more_block_of_e4m3_is_on_its_way() -> None:
    """Of half the bytes."""
    case = case_of([40])
    stages = []
    for stored in (torch.bfloat16, torch.float8_e4m3fn):
        case.cache.dtype = torch.bfloat16
        case.cache.keys = [key.to(stored) for key in case.cache.keys]
        rows = rows_of(case, 1)
        rows.plan(case.batch, np.array([500]), None, 0)
        assert rows.step is not None
        stages.append(rows.step.config.num_stages)
    assert stages == [2, 3]


@pytest.mark.parametrize("contexts", [(9, 300, 40), MIXED], ids=["few", "many"])
@pytest.mark.parametrize("window", [0, 30])
def test_one_plan_of_a_graph_serves_rows_of_any_lengths(contexts: Sequence[int], window: int) -> None:
    """What is captured is the plan's launch and all after it: here the same plan is made again as contexts change."""
    case = case_of(contexts)
    rows = rows_of(case, 4)
    static = replace(case.batch, slots=case.batch.slots.clone(), contexts=case.batch.contexts.clone())
    for order in (np.arange(len(contexts)), np.arange(len(contexts))[::-1].copy()):
        places = torch.from_numpy(order).to(DEVICE)
        static.slots.copy_(case.batch.slots[places])
        static.contexts.copy_(case.batch.contexts[places])
        rows.plan_graph(static, None, window)
        assert rows.step is not None
        assert rows.step.work.least == (0 if len(contexts) >= FEW_ROWS else 256)
        now = replace(static, context_lengths=case.batch.context_lengths[order])
        check(rows, replace(case, batch=now), window)


def test_graphs_of_few_rows_keep_what_they_were_captured_with() -> None:
    case = case_of([9, 300, 40])
    rows = rows_of(case, 4)
    rows.plan_graph(case.batch, None, 0)
    assert rows.step is not None
    first = rows.step.work
    rows.plan_graph(case.batch, None, 0)
    assert rows.step.work is first


def test_each_kernel_runs_before_a_step_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows and many; blocks of both kinds; with a prefix and without."""
    seen: set[tuple[bool, DecodeConfig, bool]] = set()

    def decode(query: Tensor, *rest: Any) -> Any:
        config, work, window, prefix = rest[7], rest[8], rest[10], rest[12]
        assert isinstance(work, DecodeWork)
        assert window == 60
        assert prefix is None or isinstance(prefix, Partial)
        seen.add((len(query) > 16, config, prefix is None))
        return decode_attention(query, *rest)

    monkeypatch.setattr(row_decode, "decode_attention", decode)
    case = make_case(0, 16, 2, 2, 16, contexts=[3], dtype=torch.bfloat16, device=DEVICE)
    monkeypatch.setattr(row_decode, "list_row_counts", lambda _: [16, 17])  # where kernels start early
    rows_of(case, 2).run_each_kernel(60)
    assert len(seen) == 8
    seen.clear()
    rows_of(case, 2).run_each_kernel(60, [17])
    assert len(seen) == 4
