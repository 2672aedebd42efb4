from __future__ import annotations

import msgspec
import pytest

from tests.unit.bench.conftest import Parse
from toka_async.bench.step import cases, describe_case, table, wants_groups
from toka_async.bench.step_load import Case
from toka_async.bench.step_result import StepResult, StepTime
from toka_async.config import load_config
from toka_async.messages import Ready

READY = Ready(
    num_pages=64, page_size=16, max_seqs=8, max_context=2048, vocab_size=9, group_min_seqs=4, group_min_tokens=64
)


def test_every_combination(parse: Parse) -> None:
    options = parse(
        "step", "--rows", "1,8", "--context", "50,200", "--shared-prefix", "0,100", "--groups", "4", "--prompt", "7"
    )
    assert list(cases(options, READY)) == [
        Case(1, 50),
        Case(8, 50),
        Case(1, 200),
        Case(8, 200),
        Case(1, 200, prefix=96, groups=1),
        Case(8, 200, prefix=96, groups=4),
        Case(prompt=7),
    ]


def test_rows_that_ask_for_more(parse: Parse) -> None:
    options = parse("step", "--rows", "1,8", "--context", "50", "--sampling", "plain,penalties", "--asking", "2")
    assert list(cases(options, READY)) == [
        Case(1, 50),
        Case(8, 50),
        Case(1, 50, sampling="penalties", asking=1),
        Case(8, 50, sampling="penalties", asking=2),
    ]
    assert [case.asking for case in cases(parse("step", "--rows", "8", "--sampling", "logprobs"), READY)] == [8, 8]


def test_another_way_to_sample_is_refused(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("step", "--sampling", "plain,beam")
    assert "allowed, got beam" in capsys.readouterr().err


def test_a_case_in_words() -> None:
    assert describe_case(Case(8, 50, 16, 2, sampling="logprobs", asking=3)) == (
        "8 rows, context 50, 16 shared, 3 asking for logprobs"
    )
    assert describe_case(Case(8, 50)) == "8 rows, context 50"


@pytest.mark.parametrize(
    ("case", "overrides", "expected"),
    [
        (Case(8, 200), [], False),
        (Case(8, 200, prefix=96, groups=2), [], True),
        (Case(7, 200, prefix=96, groups=2), [], False),
        (Case(8, 200, prefix=48, groups=2), [], False),
        (Case(7, 200, prefix=48, groups=2), ["schedule.group_min_seqs=2", "schedule.group_min_tokens=16"], True),
        (Case(8, 200, prefix=96, groups=2), ["schedule.group_min_seqs=0"], False),
    ],
)
def test_groups_are_those_that_the_scheduler_makes(case: Case, overrides: list[str], expected: bool) -> None:
    assert wants_groups(case, load_config(overrides=overrides), READY) is expected


def test_a_table_for_people() -> None:
    numbers: dict[str, object] = dict.fromkeys(StepTime.__struct_fields__, 1)
    numbers |= {"share": 0.5, "torch_share": 0.75, "rows": 64, "sampling": "plain"}
    result = StepResult(
        model="m", device="cpu", dtype="float32", cache_tokens=5, state_bytes=3 << 19, bandwidth_gb_s=1.0,
        matrix_tflops=2.0,
        steps=[msgspec.convert(numbers, StepTime)], skipped=["9 rows, context 1: no"],
    )  # fmt: skip
    first, names, row, skipped = table(result)
    assert first.startswith("m on cpu")
    assert "1.5 MiB of states a row" in first
    assert len(names) == len(row)
    assert names.split()[-4:] == ["floor_ms", "share", "torch_ms", "torch_share"]
    assert row.split()[0] == "64"
    assert row.split()[-3] == "50.0%"
    assert row.endswith("75.0%")
    assert skipped == "skipped: 9 rows, context 1: no"
