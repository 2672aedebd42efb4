from __future__ import annotations

import json
from pathlib import Path

import pytest

from toka_async.bench.gaps import GapsResult
from toka_async.cli import main

SMALL = ["--users", "12", "--rounds", "3", "--prompt-tokens", "400", "--output-tokens", "40", "--requests", "60"]


def measure(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[str, str], GapsResult]:
    """The results by load and limit."""
    assert main(["bench", "gaps", "--json", *arguments]) == 0
    found = [GapsResult(**each) for each in json.loads(capsys.readouterr().out)]
    return {(each.load, each.max_step_ms): each for each in found}


def test_a_limit_shortens_gaps_and_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    found = measure(capsys, *SMALL, "--limits", "0,4", "schedule.max_tokens=2000", "schedule.max_seqs=64")
    assert list(found) == [("users", "0"), ("trace", "0"), ("users", "4"), ("trace", "4")]
    free, limited = found["users", "0"], found["users", "4"]
    assert limited.gaps[1] < 5 < 8 < free.gaps[1]
    assert limited.prompt_steps[2] < 5
    assert limited.first_token[0] < free.first_token[0]
    assert 0.9 * free.tokens_per_second < limited.tokens_per_second
    assert free.seconds * free.tokens_per_second == pytest.approx(36 * 40, rel=1e-2)


def test_auto_is_shorter_where_somebody_streams(capsys: pytest.CaptureFixture[str]) -> None:
    """It is 40 ms there, or less: eight times a step without prompts, where its constant part counts half."""
    for step_ms, expected in (("1", 13), ("10", 40)):
        found = measure(capsys, *SMALL, "--limits", "auto", "--token-us", "100", "--step-ms", step_ms)
        assert found["users", "auto"].prompt_steps[0] == pytest.approx(expected, rel=0.1)
        assert found["trace", "auto"].prompt_steps[0] == pytest.approx(125, rel=0.1)


def test_the_table_has_a_line_for_each(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("ContextTokens,GeneratedTokens\n30,4\n50,7\n", encoding="utf-8")
    options = ["--users", "1", "--rounds", "1", "--prompt-tokens", "5", "--output-tokens", "1", "--requests", "2"]
    assert main(["bench", "gaps", *options, "--trace", str(trace)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "gap p99" in head
    assert [line.split(",")[0] for line in lines] == ["users", "trace"] * 2


def test_a_wrong_trace_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("a,b\n", encoding="utf-8")
    assert main(["bench", "gaps", "--trace", str(tmp_path / "trace.csv")]) == 2
    assert "ContextTokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["schedule.max_step_ms=20"], "use --limits"),
        (["--step-ms", "0", "--token-us", "0", "--key-ns", "0"], "must be above 0"),
    ],
    ids=["a limit as an override", "steps without time"],
)
def test_what_cannot_be_compared_is_told(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", "gaps", *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_limit_holds_on_a_slow_device(capsys: pytest.CaptureFixture[str]) -> None:
    """256 tokens alone would take longer than the limit."""
    slow = ["--step-ms", "5", "--token-us", "1000", "--users", "8", "--rounds", "3", "--requests", "4"]
    found = measure(capsys, *slow, "--limits", "40")
    assert found["users", "40"].prompt_steps[0] == pytest.approx(40, rel=0.1)
