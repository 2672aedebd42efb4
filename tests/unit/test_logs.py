from __future__ import annotations

import json
import logging
import sys

import pytest

from toka_async.logs import JsonLines, TextLines, request_id, speaker


def record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("toka_async.x", logging.WARNING, "", 0, message, args, None)
    if fields:
        made.fields = fields
    return made


def test_text() -> None:
    lines = TextLines("rank-0-0")
    assert lines.format(record("50%% of %s", "x")).endswith(" rank-0-0: 50% of x")
    token = request_id.set("r-1")
    said = lines.format(record("y"))
    assert said.startswith("[r-1] ")
    assert said.endswith(" rank-0-0: y")
    request_id.reset(token)


def test_json_is_one_line_whatever_is_said() -> None:
    lines = JsonLines("server")
    token = request_id.set("r-1")
    try:
        raise ValueError("a\nb")
    except ValueError:
        made = record('x\n"%s"', "é", status=200)
        made.exc_info = sys.exc_info()
    line = lines.format(made)
    request_id.reset(token)
    assert "\n" not in line
    data = json.loads(line)
    assert data.pop("time").endswith("+00:00")
    assert "ValueError: a\nb" in data.pop("exception")
    assert data == {
        "level": "warning",
        "process": "server",
        "logger": "toka_async.x",
        "message": 'x\n"é"',
        "request_id": "r-1",
        "status": 200,
    }
    assert json.loads(lines.format(record("z"))).keys() == {"time", "level", "process", "logger", "message"}


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_parents_lines(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    speaker(log_format)("stopped")
    said = capsys.readouterr().err
    if log_format == "json":
        assert json.loads(said)["message"] == "stopped"
    else:
        assert said == "toka-async: stopped\n"
