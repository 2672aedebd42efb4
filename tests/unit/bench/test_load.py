from __future__ import annotations

from typing import Any

import msgspec
import pytest

from toka_async.bench.load import LoadChoice, LoadReply, LoadShape, LoadUsage, Tally, request_body
from toka_async.bench.loads.served import BenchError

LOAD = LoadShape(
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
    "choices": [LoadChoice(0, "abc", "length"), LoadChoice(1, "", "stop")],
    "usage": LoadUsage(3, 11),
}


def check(done: bool = True, **fields: Any) -> None:
    tally = Tally(done=done)
    tally.add(LoadReply(**(GOOD | fields)))
    tally.check(LOAD)


def test_a_whole_answer() -> None:
    check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"done": False}, "broke off"),
        ({"choices": GOOD["choices"][:1]}, "1 samples of 2"),
        ({"choices": [LoadChoice(0, "abc", "length"), LoadChoice(2, "", "stop")]}, "2 samples of 2"),
        ({"choices": [LoadChoice(0, "abc", "length"), LoadChoice(1, "", "error")]}, "unknown finish reasons"),
        ({"choices": [LoadChoice(0, "abc", "length")] * 2}, "finished twice"),
        ({"usage": None}, "wrong usage"),
        ({"usage": LoadUsage(4, 11)}, "wrong usage"),
        ({"usage": LoadUsage(3, 10)}, "expected 11 to 20"),
        ({"usage": LoadUsage(3, 21)}, "expected 11 to 20"),
        ({"choices": [LoadChoice(0, "", "length"), LoadChoice(1, "", "stop")]}, "have no text"),
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
