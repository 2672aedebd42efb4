from __future__ import annotations

import json
import logging
import os
import re
import sys
import time

import pytest

from toka_async.log_writer import LogWriter
from toka_async.logs import (
    MOST_FRAMES,
    MOST_TEXT,
    JsonLines,
    LogHandler,
    TextLines,
    announce,
    configure,
    configure_parent,
    end_with,
    request_id,
    shorten,
)

DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("toka_async.x", logging.WARNING, "", 0, message, args, None)
    if fields:
        made.fields = fields
    return made


def failed(error: Exception) -> logging.LogRecord:
    made = record("it failed")
    made.exc_info = (type(error), error, error.__traceback__)
    return made


def test_text() -> None:
    lines = TextLines("rank-0-0")
    assert re.fullmatch(f"{DATE} WARNING rank-0-0: 50% of x", lines.format(record("50%% of %s", "x")))
    token = request_id.set("r-1")
    said = lines.format(record("y"))
    request_id.reset(token)
    assert re.fullmatch(rf"{DATE} WARNING rank-0-0 \[r-1\]: y", said)


@pytest.mark.parametrize(("on_terminal", "before"), [(True, "\r\x1b[K"), (False, "")])
def test_a_line_takes_the_place_of_a_bar(on_terminal: bool, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda fd: fd == 2 and on_terminal)
    handler, lines = LogHandler("server", "text"), list[str]()
    monkeypatch.setattr(handler.writer, "put", lines.append)
    handler.emit(record("x"))
    (line,) = lines
    assert re.fullmatch(f"{re.escape(before)}{DATE} WARNING server: x", line)


def test_a_message_is_one_line_of_text() -> None:
    """Whoever chooses a part of it cannot write a line of the log."""
    said = TextLines("server").format(record("a\n2026-01-01 00:00:00 ERROR server: forged\x1b[2J"))
    assert said.endswith(r": a\n2026-01-01 00:00:00 ERROR server: forged\x1b[2J")


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
    assert json.loads(lines.format(record("\ud800")))["message"] == r"\ud800"


def recurse() -> None:
    """Two functions take turns, which Python's own tracebacks do not shorten."""
    recurse_too()


def recurse_too() -> None:
    recurse()


@pytest.mark.parametrize("lines", [TextLines("server"), JsonLines("server")])
def test_a_line_is_bounded(lines: logging.Formatter) -> None:
    try:
        recurse()
    except RecursionError as error:
        said = lines.format(failed(error))
    assert "RecursionError" in said
    assert "earlier frames left out" in said
    assert said.count("in recurse") <= MOST_FRAMES
    assert len(said) < 2 * MOST_TEXT
    assert len(lines.format(record("%s", "x" * 10_000_000))) < 2 * MOST_TEXT
    assert len(lines.format(failed(ValueError("y" * 10_000_000)))) < 2 * MOST_TEXT


def test_a_long_text_keeps_both_ends() -> None:
    text = "begin" + "." * MOST_TEXT + "end"
    assert shorten(text).startswith("begin.")
    assert shorten(text).endswith(".end")
    assert " … 8 characters left out … " in shorten(text)
    assert shorten("short") == "short"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_parents_lines(log_format: str, capfd: pytest.CaptureFixture[str]) -> None:
    say = configure_parent(log_format)
    say("100% stopped")
    say("gone", logging.ERROR)
    said = capfd.readouterr().err
    if log_format == "json":
        lines = [json.loads(line) for line in said.splitlines()]
        assert [(line["level"], line["process"], line["message"]) for line in lines] == [
            ("info", "toka-async", "100% stopped"),
            ("error", "toka-async", "gone"),
        ]
    else:
        assert re.fullmatch(f"{DATE} INFO toka-async: 100% stopped\n{DATE} ERROR toka-async: gone\n", said)


def test_the_parent_passes_over_what_packages_merely_note(capfd: pytest.CaptureFixture[str]) -> None:
    configure_parent("text")
    logging.getLogger("httpx").info("HTTP Request: GET …")
    logging.getLogger("httpx").warning("careful")
    configure_parent("text")("done")
    assert [line.split(": ")[-1] for line in capfd.readouterr().err.splitlines()] == ["careful", "done"]


def test_configuring_again_replaces_what_was(capfd: pytest.CaptureFixture[str]) -> None:
    configure("one", "text")
    configure("two", "text")
    logging.getLogger("toka_async.x").info("once")
    logging.getLogger("toka_async.x").debug("never")
    handler = LogHandler.find_installed()
    assert handler is not None
    handler.flush()
    assert re.fullmatch(f"{DATE} INFO two: once\n", capfd.readouterr().err)


def test_a_command_ends_with_its_last_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the log's thread is late."""
    write = LogWriter._write

    def write_late(writer: LogWriter, data: bytes) -> bool:
        time.sleep(0.05)
        return write(writer, data)

    monkeypatch.setattr(LogWriter, "_write", write_late)
    configure_parent("text")
    logging.getLogger("toka_async").warning("stopping")
    end_with("toka-async: no room")
    assert re.fullmatch(f"{DATE} WARNING toka-async: stopping\ntoka-async: no room\n", capfd.readouterr().err)


def test_a_command_without_a_log_ends_with_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    end_with("toka-async: no room")
    assert capfd.readouterr().err == "toka-async: no room\n"


def test_a_line_for_programs_is_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    announce("toka-async: serving x at http://y")
    assert capfd.readouterr().out == "toka-async: serving x at http://y\n"
