"""The format of log lines, the same in every process: text for people, or a JSON object a line.

A line has date, level, process, the id of its request, and the message; code that works on a request sets `request_id`.
A line is bounded, and writing it never blocks (`log_writer`). Knows no requests.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections import Counter
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Protocol, Self

import msgspec

from toka_async.bar import CLEAR
from toka_async.log_writer import LogWriter

MOST_TEXT = 8192  # characters of a message, and of a traceback
MOST_FRAMES = 32  # newest frames of each exception's traceback
FLUSH_SECONDS = 0.5  # wait of an ending process for the reader of its last lines
SAY_SECONDS = 1.0  # wait of the parent, so that its lines and its children's keep their order

PARENT = "toka-async"
ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {ord("\n"): "\\n", ord("\t"): "\t"}

request_id: ContextVar[str] = ContextVar("request_id", default="")
# Token counts of the current request, for the log line about its end; None: there is no request.
request_tokens: ContextVar[Counter[str] | None] = ContextVar("request_tokens", default=None)


class Say(Protocol):
    def __call__(self, line: str, level: int = logging.INFO) -> None: ...


class Lines(logging.Formatter):
    """The base of the formatters of text and JSON, which bounds tracebacks."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def formatException(self, ei: object) -> str:  # noqa: N802
        """Keeps the newest frames; recursion has thousands."""
        assert isinstance(ei, tuple)
        _, error, at = ei
        if error is None:
            return ""
        text = "".join(traceback.format_exception(error, limit=-MOST_FRAMES)).rstrip("\n")
        num_frames = sum(1 for _ in traceback.walk_tb(at))
        left_out = f"\n({num_frames - MOST_FRAMES:,} earlier frames left out)" if num_frames > MOST_FRAMES else ""
        return shorten(text) + left_out


class TextLines(Lines):
    """`2026-11-22 12:34:56 INFO server [request id]: message`, then the traceback, if any."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        about = f" [{given}]" if (given := request_id.get()) else ""
        message = shorten(record.getMessage()).translate(ESCAPED)
        line = f"{when} {record.levelname} {self._process}{about}: {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(Lines):
    """One object: time (UTC), level, process, logger, message, and if known request_id and exception.

    Further keys come from the record's `fields`, a dict given as `extra={"fields": …}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": _escape_surrogates(shorten(record.getMessage())),
        }
        if about := request_id.get():
            line["request_id"] = about
        if record.exc_info:
            line["exception"] = _escape_surrogates(self.formatException(record.exc_info))
        line |= getattr(record, "fields", {})
        return msgspec.json.encode(line).decode()


class LogHandler(logging.Handler):
    """Sends a process's log to standard error without waiting for its reader."""

    def __init__(self, process: str, log_format: str) -> None:
        super().__init__()
        self.setFormatter(JsonLines(process) if log_format == "json" else TextLines(process))
        self.writer = LogWriter(2, self._format_lost)
        self._before = CLEAR if os.isatty(2) else ""  # this or another process may have drawn a bar in the line

    @classmethod
    def find_installed(cls) -> Self | None:
        return next((handler for handler in logging.getLogger().handlers if isinstance(handler, cls)), None)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.put(self._before + self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Called by `logging.shutdown` at the end of the process."""
        self.writer.flush(FLUSH_SECONDS)

    def _format_lost(self, count: int) -> str:
        message = f"{count:,} lines of the log were lost: nobody read them"
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, message, None, None))


def configure(process: str, log_format: str, others: int = logging.INFO) -> LogHandler:
    """Send all logging of this process to standard error. others: the lowest level of other packages' lines."""
    root = logging.getLogger()
    if (before := LogHandler.find_installed()) is not None:
        before.flush()
        root.removeHandler(before)
    handler = LogHandler(process, log_format)
    root.addHandler(handler)
    root.setLevel(others)
    logging.getLogger("toka_async").setLevel(logging.INFO)
    return handler


def catch_stray_lines() -> None:
    """Log what Python itself writes to standard error: warnings, and errors that end threads."""
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_failure


def say(line: str, level: int = logging.INFO) -> None:
    """Log a line of the parent process, and wait a moment until it is written."""
    handler = LogHandler.find_installed() or configure(PARENT, "text", logging.WARNING)
    logging.getLogger("toka_async").log(level, "%s", line)
    handler.writer.flush(SAY_SECONDS)


def configure_parent(log_format: str) -> Say:
    """Configure the log of the parent process in this format; returns the function that logs its lines."""
    configure(PARENT, log_format, logging.WARNING)
    return say


def announce(line: str) -> None:
    """Write a line to standard output, for programs that wait for it; waits only a moment for the reader."""
    sys.stdout.flush()
    writer = LogWriter(1)
    writer.put(line)
    writer.flush(SAY_SECONDS)


def end_with(line: str) -> None:
    """Write the line that a command ends with to standard error, after those of its log unless nobody reads them."""
    if (handler := LogHandler.find_installed()) is not None:
        handler.flush()
    print(line, file=sys.stderr, flush=True)


def shorten(text: str) -> str:
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]} … {len(text) - MOST_TEXT:,} characters left out … {text[-half:]}"


def _escape_surrogates(text: str) -> str:
    """Escape lone surrogates, which JSON cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _log_thread_failure(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        name = args.thread.name if args.thread is not None else "?"
        logging.getLogger("toka_async").error("thread %s was stopped by an error", name, exc_info=args.exc_value)
