"""The load's checks: an answer that lacks anything is an error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from toka_async.bench.load import Answer, Choice, Load, Tally, Usage, request_body
from toka_async.bench.served import BenchError

LOAD = Load(
    url="http://x",
    model="m",
    connections=1,
    waves=1,
    samples=2,
    prompt_tokens=3,
    output_tokens=10,
    vocab_size=50,
    stream=False,
)
GOOD: dict[str, Any] = {
    "choices": [Choice(0, "abc", "length"), Choice(1, "", "stop")],
    "usage": Usage(3, 11),
}


def check(done: bool = True, **fields: Any) -> None:
    tally = Tally(done=done)
    tally.add(Answer(**(GOOD | fields)))
    tally.check(LOAD)


def test_a_whole_answer() -> None:
    check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"done": False}, "broke off"),
        ({"choices": GOOD["choices"][:1]}, "1 samples of 2"),
        ({"choices": [Choice(0, "abc", "length"), Choice(2, "", "stop")]}, "2 samples of 2"),
        ({"choices": [Choice(0, "abc", "length"), Choice(1, "", "error")]}, "unknown finish reasons"),
        ({"choices": [Choice(0, "abc", "length")] * 2}, "finished twice"),
        ({"usage": None}, "wrong usage"),
        ({"usage": Usage(4, 11)}, "wrong usage"),
        ({"usage": Usage(3, 10)}, "expected 11 to 20"),
        ({"usage": Usage(3, 21)}, "expected 11 to 20"),
        ({"choices": [Choice(0, "", "length"), Choice(1, "", "stop")]}, "have no text"),
    ],
)
def test_what_is_missing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        check(**fields)


def test_prompts_differ() -> None:
    first, second = (msgspec.json.decode(request_body(LOAD, number))["prompt"] for number in (0, 1))
    assert len(first) == len(second) == 3
    assert first != second
    assert all(0 < token < 50 for token in first + second)
