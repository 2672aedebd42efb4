"""Reads the parameters in the URL of a request. Knows aiohttp; knows nothing of what is asked."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import TypeVar

from aiohttp import web

from toka_async.openai.errors import bad_request

MAX_NAME = 255  # characters of a client's text that are kept

_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{0,12})?(e\+?[0-9]{1,2})?", re.ASCII | re.IGNORECASE)

C = TypeVar("C", bound=str)


class Query:
    """The parameters of a request. Raises ApiError (400) for others.

    repeated: those that may be given more than once.
    """

    def __init__(self, request: web.Request, known: Container[str], repeated: Container[str] = ()) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in request.query.items():
            if name not in known:
                raise bad_request(f"'{clean_name(name)}' is not supported", param=clean_name(name))
            if name in self._values and name not in repeated:
                raise bad_request(f"'{name}' is given more than once", param=name)
            self._values.setdefault(name, []).append(clean_name(value))

    def text(self, name: str) -> str | None:
        return self._values.get(name, [None])[0]

    def number(self, name: str, default: int, most: int) -> int:
        text = self._values.get(name, [str(default)])[0]
        if not (text.isascii() and text.isdecimal() and len(text) <= 12 and 1 <= int(text) <= most):
            raise bad_request(f"'{name}' must be 1 to {most}, got {text!r}", param=name)
        return int(text)

    def check_seconds(self, name: str) -> None:
        """Checks a time-out that is not needed."""
        text = self.text(name)
        if text is not None and not _SECONDS.fullmatch(text):
            raise bad_request(f"'{name}' must be a number of seconds, got {text!r}", param=name)

    def choice(self, name: str, options: Sequence[C], default: C) -> C:
        return pick(name, self._values.get(name, [default])[0], options)

    def choices(self, name: str, options: Sequence[C]) -> list[C]:
        """All values of a parameter that may be repeated."""
        return [pick(name, text, options) for text in self._values.get(name, ())]

    def flag(self, name: str, *, default: bool) -> bool:
        """A bool as clients write it: true or 1, in any case."""
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in ("true", "false", "1", "0"):
            raise bad_request(f"'{name}' must be true or false, got {text!r}", param=name)
        return text.lower() in ("true", "1")


def pick(name: str, text: str, options: Sequence[C]) -> C:
    """Returns the option that a text names. Raises ApiError (400)."""
    found = next((option for option in options if option == text), None)
    if found is None:
        raise bad_request(f"'{name}' must be {' or '.join(options)}, got {text!r}", param=name)
    return found


def clean_name(name: str) -> str:
    """Makes a client's text fit for JSON."""
    return name[:MAX_NAME].encode("utf-8", "replace").decode()
