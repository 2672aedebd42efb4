from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.fakes.attention_part import Cost, FakePart
from toka_async.attention.base import AttentionBatch, PrefixGroup
from toka_async.attention.build import AttentionParts
from toka_async.attention.choice import ChoiceTable, MeasuredShape, find_nearest
from toka_async.attention.kv_cache import KVCache
from toka_async.tuning.attention import GROUP_ROWS, GROUP_TOKENS, AttentionChoice, spread_contexts, time_part

PAGE = 16


def choice_of(
    costs: dict[str, Cost], num_pages: int = 1 << 14, max_seqs: int = 8192, max_tokens: int = 32768
) -> tuple[AttentionChoice, dict[str, FakePart]]:
    spent: list[float] = []

    def clock(plan: Callable[[], None], run: Callable[[], None], num_layers: int) -> float:
        assert num_layers == 2
        plan()
        run()
        return spent.pop()

    cache = KVCache(2, num_pages, 1, PAGE, 8, torch.bfloat16, torch.device("meta"))
    cache.device = torch.device("cpu")  # of batches
    parts = {name: FakePart(cost, spent) for name, cost in costs.items()}
    return AttentionChoice(AttentionParts(cache, 4, max_seqs, max_tokens, parts, parts), clock), parts


def measured(costs: dict[str, Cost], **limits: int) -> tuple[ChoiceTable, dict[str, FakePart]]:
    choice, parts = choice_of(costs, **limits)
    return choice.measure(), parts


def unshared(batch: AttentionBatch, groups: tuple[PrefixGroup, ...]) -> float:
    """Tokens to read, those of a prefix once for its group."""
    return float(batch.context_lengths.sum()) - sum((group.num_rows - 1) * group.num_pages * PAGE for group in groups)


def planned(batch: AttentionBatch, groups: tuple[PrefixGroup, ...]) -> float:
    """Twice as fast, but for 300 tokens' time a row."""
    return unshared(batch, groups) / 2 + 300 * len(batch.query_lengths)


def test_the_fastest_part_is_chosen_for_each_shape() -> None:
    table, _ = measured({"own": unshared, "planned": planned})
    assert [find_nearest(table.decode, 16, context) for context in (128, 1024, 8192)] == ["own", "planned", "planned"]
    assert [find_nearest(table.chunks, *shape) for shape in ((512, 512), (4096, 4096))] == ["own", "planned"]
    assert [find_nearest(table.grouped, *shape) for shape in ((128, 64), (2, 4096))] == ["own", "planned"]


def test_groups_from_where_sharing_pays() -> None:
    def with_merge(batch: AttentionBatch, groups: tuple[PrefixGroup, ...]) -> float:
        return unshared(batch, groups) + 300 * len(groups)

    table, _ = measured({"own": with_merge})
    assert table.groups == ((4, 256), (8, 64))  # 7 * 64 tokens spared are more than 300, 3 * 64 are not


def test_no_groups_where_sharing_never_pays() -> None:
    def nearly_equal(_: AttentionBatch, groups: tuple[PrefixGroup, ...]) -> float:
        return 1 - 0.02 * bool(groups)  # as much as times differ by chance

    table, _ = measured({"own": nearly_equal})
    assert table.groups == ()


def test_rows_that_are_compared_share_pages_whether_the_parts_know_or_not() -> None:
    _, parts = measured({"own": unshared})
    grouped, alone = parts["own"].batches[-2:]
    assert grouped.groups
    assert not alone.groups
    assert torch.equal(grouped.page_table, alone.page_table)


def test_a_single_part_is_measured_for_its_groups_only() -> None:
    _, parts = measured({"own": unshared})
    assert all(batch.num_decode == len(batch.query_lengths) for batch in parts["own"].batches)
    assert len(parts["own"].batches) == 2 * len(GROUP_ROWS) * len(GROUP_TOKENS)


def test_what_is_measured_fits() -> None:
    table, parts = measured({"own": unshared, "planned": planned}, num_pages=20, max_seqs=12, max_tokens=600)
    for batch in parts["own"].batches:
        assert len(batch.query_lengths) <= 12
        assert batch.query_lengths.sum() <= 600
        assert batch.context_lengths.max() <= 320
        assert batch.page_table.max() < 20
        assert batch.page_table.shape[1] * PAGE >= batch.context_lengths.max()
    assert [(point.size, point.tokens) for point in table.decode] == [(1, 128)]


def test_nothing_fits() -> None:
    table, _ = measured({"own": unshared, "planned": planned}, num_pages=1, max_seqs=1, max_tokens=1)
    assert table.groups == ()
    assert [points[0].choice for points in (table.decode, table.grouped, table.chunks)] == ["own"] * 3


def test_rows_are_as_uneven_as_conversations() -> None:
    assert spread_contexts(1, 1024, 4096) == [1024]
    contexts = spread_contexts(128, 1300, 1 << 20)
    assert sum(contexts) / 128 == pytest.approx(1300, rel=0.01)
    assert 5 * 1300 < max(contexts) < 6 * 1300
    assert min(contexts) < 10
    assert contexts != sorted(contexts)
    assert max(spread_contexts(128, 1300, 2000)) == 2000


def test_the_facts_say_what_is_measured() -> None:
    """So that a cache of a few pages more, as every start finds other memory, asks the same question."""
    choice, parts = choice_of({"own": unshared, "planned": planned})
    choice.measure()
    facts = json.loads(json.dumps(choice.describe()))
    decode, chunks, groups = facts["shapes"]
    shapes = [(batch.num_decode, len(batch.query_lengths)) for batch in parts["own"].batches]
    assert [rows for rows, total in shapes if rows == 0] == [0] * len(chunks)
    assert [rows for rows, _ in shapes if rows][-len(decode) :] == [rows for rows, _ in decode]
    assert [rows for rows, _ in shapes if rows][: 2 * len(groups) : 2] == [rows * count for rows, _, count in groups]
    del facts["shapes"]
    assert facts == {
        "heads": [4, 1, 8],
        "layers": 2,
        "page_size": PAGE,
        "dtype": "torch.bfloat16",
        "stored": "torch.bfloat16",
        "sinks": False,
        "parts": [["own", "planned"]] * 2,
    }
    facts["shapes"] = [decode, chunks, groups]
    assert facts == json.loads(json.dumps(choice_of({"own": unshared, "planned": planned}, 16400)[0].describe()))
    for other in (choice_of({"own": unshared}), choice_of({"own": unshared, "planned": planned}, max_seqs=64)):
        assert other[0].describe() != facts


def test_a_table_of_the_same_parts_is_admitted() -> None:
    choice, _ = choice_of({"own": unshared, "planned": planned}, max_seqs=64)
    assert choice.admits(choice.measure())
    alone, _ = choice_of({"own": unshared})
    assert alone.admits(alone.measure())


POINT = (MeasuredShape(1, 2, "own"),)


@pytest.mark.parametrize(
    "table",
    [
        ChoiceTable((), POINT, POINT, ()),
        ChoiceTable(POINT, (), POINT, ()),
        ChoiceTable(POINT, POINT, (), ()),
        ChoiceTable((MeasuredShape(1, 2, "mixed"),), POINT, POINT, ()),
        ChoiceTable(POINT, (*POINT, MeasuredShape(1, 2, "mixed")), POINT, ()),
        ChoiceTable(POINT, POINT, (MeasuredShape(1, 2, "decodes"),), ()),
        ChoiceTable((MeasuredShape(0, 2, "own"),), POINT, POINT, ()),
        ChoiceTable(POINT, (MeasuredShape(1, -2, "own"),), POINT, ()),
        ChoiceTable(POINT, POINT, (MeasuredShape(10**400, 2, "own"),), ()),
        ChoiceTable(POINT, POINT, POINT, ((0, 0),)),
        ChoiceTable(POINT, POINT, POINT, ((4, 64), (4, 65))),
    ],
)
def test_a_table_that_could_not_be_chosen_by_is_not_admitted(table: ChoiceTable) -> None:
    """Steps would fail."""
    choice, parts = choice_of({"own": unshared})
    choice = replace(choice, parts=replace(choice.parts, decode={**parts, "decodes": parts["own"]}))
    assert choice.admits(ChoiceTable((MeasuredShape(1, 2, "decodes"),), POINT, POINT, ((4, 64),)))
    assert not choice.admits(table)


def test_the_clock_takes_the_least_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes 3 s on the host and a run 0.5 s on the device, but for what compiles at first and what disturbs."""
    host, device = [0.0], [0.0]
    plans, runs = iter((90.0, 8.0, 3.0, 4.0)), iter((90.0, *(0.5,) * 3, *(0.5, 6.0, 0.5), *(0.7,) * 3))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = 0.0

        def record(self) -> None:
            self.at = device[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return 1000 * (other.at - self.at)

    def plan() -> None:
        host[0] += next(plans)

    def run() -> None:
        device[0] += next(runs)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(time, "perf_counter", lambda: host[0])
    assert time_part(plan, run, num_layers=10) == pytest.approx(3 + 10 * 0.5)
    assert next(plans, None) is None
    assert next(runs, None) is None
