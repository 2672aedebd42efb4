"""Our own decoding goes on from the prefixes that FlashInfer attended."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.cases.attention import E4M3_SCALED, AttentionCase, make_case
from tests.fakes import flashinfer as fake_flashinfer
from toka_async.attention.cascade import CascadeDecode
from toka_async.attention.flashinfer import WrapperShape

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the wrappers here are for the CPU")


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)


def part_for(case: AttentionCase) -> CascadeDecode:
    workspace = torch.zeros(1, dtype=torch.uint8)
    return CascadeDecode(WrapperShape(case.cache, case.num_heads, case.scale, 16, 16, workspace))


def decoded(part: CascadeDecode, case: AttentionCase, window: int = 0) -> torch.Tensor:
    query = case.query[: case.batch.num_decode]
    output = torch.empty_like(query)
    part.plan(case.batch, case.batch.groups, window)
    part.run(0, query, output, case.sinks)
    return output


@pytest.mark.parametrize("contexts", [[], [9]], ids=["all grouped", "a row between"])
@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_grouped_rows_equal_the_definition(contexts: list[int], window: int, has_sinks: bool) -> None:
    case = make_case(0, 4, 1, 2, 16, [(2, 5), (2, 2)], contexts, has_sinks=has_sinks)
    part = part_for(case)
    torch.testing.assert_close(decoded(part, case, window), case.expected(window), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("contexts", [[], [9]], ids=["all grouped", "a row between"])
def test_a_cache_in_e4m3_equals_the_definition(contexts: list[int]) -> None:
    case = make_case(0, 4, 1, 2, 16, [(2, 5), (2, 2)], contexts, stored=E4M3_SCALED)
    torch.testing.assert_close(decoded(part_for(case), case), case.expected(), atol=2e-5, rtol=1e-5)


def test_without_groups_it_is_our_own() -> None:
    case = make_case(0, 4, 1, 2, 16, [(2, 5)])
    part = part_for(case)
    decoded(part, case)
    case.batch = replace(case.batch, groups=())
    torch.testing.assert_close(decoded(part, case), case.expected(), atol=2e-5, rtol=1e-5)
    assert part.prefix is None
