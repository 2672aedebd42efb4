from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toka_async.batches.results import Answered, LineError, encode_line
from toka_async.tables.answers import MISSING, RowAnswer, RowAnswers, open_answers


def encode(row: int, body: Any, status: int = 200) -> bytes:
    answered = Answered(str(row), status, json.dumps(body).encode())
    return encode_line("batch_b", row, 0, answered).data


def make_body(*choices: dict[str, Any]) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    return {"id": "x", "choices": list(choices), "usage": usage}


def read_all(folder: Path, answers: bytes, errors: bytes, num_rows: int) -> list[RowAnswer]:
    (folder / "answers").write_bytes(answers)
    if errors:
        (folder / "errors").write_bytes(errors)
    with open_answers(folder / "answers", folder / "errors", folder / "index", num_rows) as opened:
        assert isinstance(opened, RowAnswers)
        found = [opened.read(row) for row in range(num_rows)]
    assert not (folder / "index").exists()
    return found


def test_answers_in_the_order_of_the_rows(tmp_path: Path) -> None:
    """Each in the order of its samples."""
    text = make_body({"index": 0, "text": "t", "finish_reason": "stop"})
    chat = make_body(
        {"index": 1, "message": {"role": "assistant", "content": None}, "finish_reason": "length"},
        {"index": 0, "message": {"role": "assistant", "content": "ü"}, "finish_reason": "stop"},
    )
    error = encode(1, {"error": {"message": "too long", "type": "t", "param": None, "code": 400}}, 400)
    cut = encode_line("batch_b", 4, 0, Answered("4", error=LineError("batch_cancelled", "cancelled"))).data
    first, second, third, fourth, fifth = read_all(tmp_path, encode(2, chat) + encode(0, text), error + cut, 5)
    assert first == RowAnswer(["t"], ["stop"], 3, 5, response=json.dumps(text))
    assert (second.texts, second.error) == ([], "too long")
    assert (third.texts, third.finish_reasons) == (["ü", ""], ["stop", "length"])
    assert fourth.error == MISSING
    assert fifth.error == "cancelled"


def test_a_run_without_failed_rows(tmp_path: Path) -> None:
    (answer,) = read_all(tmp_path, encode(0, make_body({"index": 0, "text": "t", "finish_reason": "stop"})), b"", 1)
    assert answer.texts == ["t"]
