from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from tests.fakes.attention_part import FakePart
from tests.unit.bench.conftest import Parse
from toka_async.attention.build import AttentionParts
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.triton import TritonDecode
from toka_async.attention.try_out import TrialShape
from toka_async.bench import attention
from toka_async.bench.attention import DeviceRates, compute_floors, describe, list_shapes, time_parts

RATES = DeviceRates(bandwidth=1e6, flops=1e9)


def test_rows_are_even_uneven_and_with_a_long_one(parse: Parse) -> None:
    options = parse(
        "attention", "--rows", "1,4", "--context", "100", "--longest", "900", "--chunk", "20", "--after", "70"
    )
    shapes = dict(list_shapes(options))
    assert list(shapes) == [
        "1 rows of 100",
        "4 rows of 100",
        "4 uneven rows of 100",
        "4 rows, one of 900",
        "20 tokens after 70",
    ]
    assert [context for context, _ in shapes["4 rows, one of 900"].rows] == [900, 100, 100, 100]
    assert sum(context for context, _ in shapes["4 uneven rows of 100"].rows) == pytest.approx(400, abs=4)
    assert shapes["20 tokens after 70"] == TrialShape(((90, 20),), 0)


@pytest.mark.parametrize(
    ("rows", "num_keys", "num_pairs"),
    [(((100, 1), (50, 1)), 150, 150), (((90, 20),), 90, sum(range(71, 91)))],
    ids=["decoding", "a chunk"],
)
def test_the_floor_is_what_must_be_read_or_multiplied(
    rows: tuple[tuple[int, int], ...], num_keys: int, num_pairs: int
) -> None:
    cache = KVCache(1, 1, 2, 16, 8, torch.bfloat16, torch.device("cpu"))
    read, multiply = compute_floors(TrialShape(rows, 0), 4, cache, DeviceRates(1.0, 1.0))
    assert read == num_keys * 2 * 2 * 8 * 2  # keys and values, heads, dim, bytes
    assert multiply == num_pairs * 2 * 2 * 4 * 8  # two products, heads, dim


def test_every_part_is_timed_and_ours_as_in_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(call: Callable[[], None], num_calls: int = 1, head_start: int = 0) -> float:  # noqa: ARG001
        call()
        return 40.0

    monkeypatch.setattr(attention, "time_calls", play)
    monkeypatch.setattr(attention, "time_host", play)
    cache = KVCache(2, 8, 1, 16, 8, torch.bfloat16, torch.device("cpu"))
    own, other = TritonDecode(cache, 4), FakePart(lambda *_: 0.0, [])
    parts = AttentionParts(cache, 4, 8, 64, {"triton": own, "other": other}, {"other": other})
    times = [*time_parts(parts, "two rows", TrialShape(((20, 1), (9, 1)), 2), RATES)]
    assert [each.part for each in times] == ["triton", "in graphs", "other"]
    assert {(each.shape, each.dim, each.ms) for each in times} == {("two rows", 8, 2.0)}
    assert "two rows" in describe(times[0])
    assert [each.part for each in time_parts(parts, "a chunk", TrialShape(((20, 5),), 0), RATES)] == ["other"]


def test_without_a_gpu_nothing_but_the_error_is_printed(
    parse: Parse, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert attention.main(parse("attention")) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "need a GPU" in printed.err
