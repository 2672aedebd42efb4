"""What log lines look like: text for people, or a JSON object a line; with the id of the request that they are about.

Knows no requests: whoever works on one says so by setting `request_id`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime

import msgspec

request_id: ContextVar[str] = ContextVar("request_id", default="")


class TextLines(logging.Formatter):
    """`[the request's id] 12:34:56 server: what happened`."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process.replace('%', '%%')}: %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line, about = super().format(record), request_id.get()
        return f"[{about}] {line}" if about else line


class JsonLines(logging.Formatter):
    """One object: time (UTC), level, process, logger, message, request_id and exception where there is one.

    Further keys come from the record's `fields`, a dict given as `extra={"fields": …}`.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if about := request_id.get():
            line["request_id"] = about
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line |= getattr(record, "fields", {})
        return msgspec.json.encode(line).decode()


def configure(process: str, log_format: str) -> None:
    """All logging of this process goes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if log_format == "json" else TextLines(process))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


def say(line: str) -> None:
    """A line for people, from the parent process."""
    speaker("text")(line)


def speaker(log_format: str) -> Callable[[str], None]:
    """What the parent process says its lines with, on standard error."""
    formatter = JsonLines("toka-async")

    def write(line: str) -> None:
        if log_format == "json":
            record = logging.LogRecord("toka_async", logging.INFO, "", 0, line, None, None)
            text = formatter.format(record)
        else:
            text = f"toka-async: {line}"
        with contextlib.suppress(OSError):  # nobody reads it
            print(text, file=sys.stderr, flush=True)

    return write
