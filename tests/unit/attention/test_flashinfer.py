"""FlashInfer's parts tell the wrappers the right rows, pages and keys, and merge what comes back."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.cases.attention import E4M3_SCALED, AttentionCase, make_case
from tests.fakes import flashinfer as fake_flashinfer
from toka_async.attention.base import PrefixGroup
from toka_async.attention.flashinfer import (
    FlashInferChunks,
    FlashInferDecode,
    WrapperShape,
    explain_failure,
    explain_no_flashinfer,
    make_workspace,
)
from toka_async.attention.kv_cache import KVCache


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)


def shape_of(case: AttentionCase, max_seqs: int = 32, max_tokens: int = 256) -> WrapperShape:
    workspace = torch.zeros(1, dtype=torch.uint8)
    return WrapperShape(case.cache, case.num_heads, case.scale, max_seqs, max_tokens, workspace)


def decoded(case: AttentionCase, part: FlashInferDecode, window: int) -> torch.Tensor:
    query = case.query[: case.batch.num_decode]
    output = torch.empty_like(query)
    part.plan(case.batch, case.batch.groups, window)
    part.run(0, query, output, case.sinks)
    return output


cases = st.builds(
    make_case,
    seed=st.integers(0, 1000),
    page_size=st.sampled_from([1, 2, 5, 16]),
    kv_heads=st.integers(1, 2),
    group_size=st.sampled_from([1, 3, 5]),
    dim=st.just(4),
    groups=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), max_size=3),
    contexts=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    chunks=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 25)), min_size=1, max_size=3),
    has_sinks=st.booleans(),
)
RELAXED = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@RELAXED
@given(case=cases, window=st.sampled_from([0, 0, 1, 7, 30, 1000]))
def test_decoding_rows_equal_the_definition(case: AttentionCase, window: int) -> None:
    output = decoded(case, FlashInferDecode(shape_of(case)), window)
    torch.testing.assert_close(output, case.expected(window)[: case.batch.num_decode], atol=2e-5, rtol=1e-5)


@RELAXED
@given(case=cases, window=st.sampled_from([0, 0, 1, 7, 30, 1000]))
def test_chunks_equal_the_definition(case: AttentionCase, window: int) -> None:
    part = FlashInferChunks(shape_of(case))
    query = case.query[case.batch.num_decode :]
    output = torch.empty_like(query)
    part.plan(case.batch, window)
    part.run(0, query, output, case.sinks)
    torch.testing.assert_close(output, case.expected(window)[case.batch.num_decode :], atol=2e-5, rtol=1e-5)


def test_a_prefix_is_read_once_for_its_group() -> None:
    case = make_case(0, 4, 1, 2, 4, groups=[(3, 5), (2, 2)], contexts=[9])
    part = FlashInferDecode(shape_of(case))
    decoded(case, part, 0)
    prefix, own = part.planned.prefix, part.planned.own
    assert [(queries.stop - queries.start, len(places)) for queries, places in prefix.rows] == [(3, 20), (2, 8)]
    skipped = [20, 20, 20, 0, 8, 8]
    assert [len(places) for _, places in own.rows] == (case.batch.context_lengths - skipped).tolist()


def test_a_group_out_of_a_rows_window_is_read_row_by_row() -> None:
    case = make_case(0, 4, 1, 2, 4, groups=[(3, 5)])
    part = FlashInferDecode(shape_of(case))
    window = int(case.batch.context_lengths.max())
    decoded(case, part, window)
    assert part.planned.prefix is not None
    decoded(case, part, window - 1)
    assert part.planned.prefix is None


def test_pages_before_every_window_are_not_read() -> None:
    case = make_case(0, 4, 1, 1, 4, contexts=[50, 9])
    part = FlashInferDecode(shape_of(case))
    decoded(case, part, 6)
    assert [len(places) for _, places in part.planned.own.rows] == [50 - 44, 9 - 0]


@pytest.mark.parametrize("groups", [[], [(3, 5)]])
def test_a_cache_in_e4m3_equals_the_definition(groups: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 would need queries in E4M3, so the other one attends."""
    case = make_case(0, 4, 1, 2, 4, groups, contexts=[9, 5], chunks=[(3, 4)], stored=E4M3_SCALED)
    shape, num_decode = shape_of(case), case.batch.num_decode
    torch.testing.assert_close(
        decoded(case, FlashInferDecode(shape), 0), case.expected()[:num_decode], atol=2e-5, rtol=1e-5
    )
    chunks, query = FlashInferChunks(shape), case.query[num_decode:]
    output = torch.empty_like(query)
    chunks.plan(case.batch, 0)
    chunks.run(0, query, output, case.sinks)
    torch.testing.assert_close(output, case.expected()[num_decode:], atol=2e-5, rtol=1e-5)
    case.cache.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert shape.backend == "fa2"


def test_wrappers_are_planned_in_turn() -> None:
    """A plan is copied to the device after it was made: the next one must not be made in the same memory."""
    case = make_case(0, 4, 1, 1, 4, contexts=[50, 9], chunks=[(3, 4)])
    part = FlashInferChunks(shape_of(case))
    planned = []
    for _ in range(4):
        part.plan(case.batch, 0)
        planned.append(part.wrapper)
    assert len({id(wrapper) for wrapper in planned[:3]}) == 3
    assert planned[3] is planned[0]


@pytest.mark.parametrize(("group_size", "expected"), [(1, False), (3, False), (4, True), (7, True)])
def test_tensor_cores_are_for_several_heads_of_a_key(group_size: int, expected: bool) -> None:
    case = make_case(0, 4, 1, group_size, 4, contexts=[5])
    part = FlashInferDecode(shape_of(case))
    decoded(case, part, 0)
    assert part.planned.own.use_tensor_cores is expected


def test_many_heads_get_room_for_their_schedule() -> None:
    case = make_case(0, 4, 1, 128, 4, chunks=[(0, 5)])
    part = FlashInferChunks(shape_of(case, max_seqs=4096, max_tokens=32768))
    part.plan(case.batch, 0)
    assert part.wrapper.schedule_size > 28 * 128 * 4096


def test_the_most_rows_fit_the_pinned_memory() -> None:
    case = make_case(0, 1, 1, 1, 4, groups=[(2, 3), (2, 1)], contexts=[1, 2])
    part = FlashInferDecode(shape_of(case, max_seqs=6))
    torch.testing.assert_close(decoded(case, part, 0), case.expected(), atol=2e-5, rtol=1e-5)


def test_the_workspace_holds_split_results() -> None:
    cache = KVCache(1, 2, 1, 4, 64, torch.float32, torch.device("cpu"))
    assert len(make_workspace(cache, 8)) > 2 * 8 * 128 * 65 * 4


def test_groups_are_the_callers_choice() -> None:
    case = make_case(0, 4, 1, 2, 4, groups=[(3, 5)])
    part = FlashInferDecode(shape_of(case))
    part.plan(case.batch, (), 0)
    assert part.planned.prefix is None
    part.plan(replace(case.batch, groups=()), (PrefixGroup(0, 2, 3),), 0)
    assert part.planned.grouped == slice(0, 2)


def reason(dim: int, dtype: torch.dtype, on_cuda: bool = True) -> str:
    return explain_no_flashinfer(torch.device("cuda" if on_cuda else "cpu"), dtype, dim)


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA device, got cpu" in reason(64, torch.bfloat16, on_cuda=False)
    assert "got float32" in reason(64, torch.float32)
    assert "the model has 80" in reason(80, torch.float16)
    assert not any(reason(dim, dtype) for dim in (64, 128, 256) for dtype in (torch.bfloat16, torch.float16))
    monkeypatch.setattr("importlib.util.find_spec", {}.get)
    assert reason(64, torch.bfloat16) == (
        "the package flashinfer-python is not installed; pip install 'flashinfer-python<0.7', or use auto"
    )


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", "RuntimeError"),
        ("Could not find nvcc\nand more", "Could not find nvcc"),
        (
            "Ninja build failed. Ninja output:\n[1/3] nvcc -c error.cu\n/bin/sh: 1: nvcc: not found\nninja: stopped",
            "/bin/sh: 1: nvcc: not found",
        ),
        (
            "Ninja build failed. Ninja output:\n[1/3] nvcc -c a.cu\na.cu(3): error: no such type\nninja: stopped",
            "a.cu(3): error: no such type",
        ),
    ],
)
def test_a_failure_is_one_line(said: str, expected: str) -> None:
    assert explain_failure(RuntimeError(said)) == expected
