"""What log lines look like, the same in every process: text for people, or a JSON object a line.

Date, level, process, the id of the request that the line is about, and the message. Whoever works on a request says so
by setting `request_id`. A line is bounded, and writing it waits for nobody (`log_writer`). Knows no requests.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections import Counter
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Protocol, Self

import msgspec

from toka_async.log_writer import LogWriter

MOST_TEXT = 8192  # characters of a message, and of a traceback
MOST_FRAMES = 32  # of each exception's traceback, the newest
FLUSH_SECONDS = 0.5  # that a process waits at its end for the reader of its last lines
SAY_SECONDS = 1.0  # that the parent waits, so that its lines and those of others keep their order

PARENT = "toka-async"
ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {ord("\n"): "\\n", ord("\t"): "\t"}

request_id: ContextVar[str] = ContextVar("request_id", default="")
# Tokens of the request, added up by whoever works on it, for the line that tells of its end; None: there is none.
request_tokens: ContextVar[Counter[str] | None] = ContextVar("request_tokens", default=None)


class Say(Protocol):
    """Says a line, by default as an ordinary one."""

    def __call__(self, line: str, level: int = logging.INFO) -> None: ...


class Lines(logging.Formatter):
    """What text and JSON have in common: tracebacks that are bounded."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def formatException(self, ei: object) -> str:  # noqa: N802
        """The newest frames; recursion has thousands."""
        assert isinstance(ei, tuple)
        _, error, at = ei
        if error is None:
            return ""
        text = "".join(traceback.format_exception(error, limit=-MOST_FRAMES)).rstrip("\n")
        num_frames = sum(1 for _ in traceback.walk_tb(at))
        left_out = f"\n({num_frames - MOST_FRAMES:,} earlier frames left out)" if num_frames > MOST_FRAMES else ""
        return bounded(text) + left_out


class TextLines(Lines):
    """`2026-11-22 12:34:56 INFO server [the request's id]: what happened`, then the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        about = f" [{given}]" if (given := request_id.get()) else ""
        message = bounded(record.getMessage()).translate(ESCAPED)
        line = f"{when} {record.levelname} {self._process}{about}: {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(Lines):
    """One object: time (UTC), level, process, logger, message, request_id and exception where there is one.

    Further keys come from the record's `fields`, a dict given as `extra={"fields": …}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": _encodable(bounded(record.getMessage())),
        }
        if about := request_id.get():
            line["request_id"] = about
        if record.exc_info:
            line["exception"] = _encodable(self.formatException(record.exc_info))
        line |= getattr(record, "fields", {})
        return msgspec.json.encode(line).decode()


class LogHandler(logging.Handler):
    """All logging of a process, to standard error; whoever logs does not wait for the reader."""

    def __init__(self, process: str, log_format: str) -> None:
        super().__init__()
        self.setFormatter(JsonLines(process) if log_format == "json" else TextLines(process))
        self.writer = LogWriter(2, self._lost)

    @classmethod
    def installed(cls) -> Self | None:
        """The process's own, if it has one."""
        return next((handler for handler in logging.getLogger().handlers if isinstance(handler, cls)), None)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.put(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Called at the end of the process by `logging.shutdown`."""
        self.writer.flush(FLUSH_SECONDS)

    def _lost(self, count: int) -> str:
        message = f"{count:,} lines of the log were lost: nobody read them"
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, message, None, None))


def configure(process: str, log_format: str, others: int = logging.INFO) -> LogHandler:
    """All logging of this process goes to standard error. others: the least level of other packages' lines."""
    root = logging.getLogger()
    if (before := LogHandler.installed()) is not None:
        before.flush()
        root.removeHandler(before)
    handler = LogHandler(process, log_format)
    root.addHandler(handler)
    root.setLevel(others)
    logging.getLogger("toka_async").setLevel(logging.INFO)
    return handler


def catch_stray_lines() -> None:
    """What Python itself writes to standard error, warnings and the ends of threads, is logged like all else."""
    logging.captureWarnings(True)
    threading.excepthook = _thread_failed


def say(line: str, level: int = logging.INFO) -> None:
    """A line from the parent process, written when this returns; where nobody reads, soon or never."""
    handler = LogHandler.installed() or configure(PARENT, "text", logging.WARNING)
    logging.getLogger("toka_async").log(level, "%s", line)
    handler.writer.flush(SAY_SECONDS)


def speaker(log_format: str) -> Say:
    """What the parent process says its lines with, on standard error, from now on in this format."""
    configure(PARENT, log_format, logging.WARNING)
    return say


def announce(line: str) -> None:
    """A line on standard output, for programs that wait for it; a reader that takes nothing stops nobody."""
    sys.stdout.flush()
    writer = LogWriter(1)
    writer.put(line)
    writer.flush(SAY_SECONDS)


def bounded(text: str) -> str:
    """Its beginning and its end, where it is long."""
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]} … {len(text) - MOST_TEXT:,} characters left out … {text[-half:]}"


def _encodable(text: str) -> str:
    """Without the lone surrogates that JSON cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        name = args.thread.name if args.thread is not None else "?"
        logging.getLogger("toka_async").error("thread %s was stopped by an error", name, exc_info=args.exc_value)
