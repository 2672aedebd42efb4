"""Reads API keys and keys of admins from files and from the environment, and compares them in constant time.

Knows no HTTP. No message contains a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from time import monotonic

from toka_async.config import AuthConfig, ConfigError

logger = logging.getLogger(__name__)

API, ADMIN = "auth.api_keys", "auth.admin_keys"
VARIABLES = {API: "TOKA_API_KEYS", ADMIN: "TOKA_ADMIN_KEYS"}
PAUSE = 1.0  # seconds
MIN_LENGTH = 8
_KEY = re.compile(r"[\x21-\x7e]+", re.ASCII)
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_LIMITS = ("max_requests", "max_held_tokens", "max_waiting")
_SEES_ALL = "metrics=all"


@dataclass(frozen=True, slots=True)
class Key:
    """A key, as its digest. Limits of None: the configured ones hold. is_named: its line gives a name.

    sees_all: its metrics show all keys, not only itself. is_admin: it may change the model.
    """

    digest: bytes
    name: str
    max_requests: int | None = None
    max_tokens: int | None = None
    max_waiting: int | None = None
    is_named: bool = True
    sees_all: bool = False
    is_admin: bool = False

    @property
    def owner(self) -> str:
        """Returns the owner of files and batches: the name if the key has one, else the key itself."""
        return f"name {self.name}" if self.is_named else f"digest {self.digest.hex()}"


@dataclass(frozen=True, slots=True)
class Keys:
    """All accepted keys; without any, requests need none."""

    keys: tuple[Key, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keys)

    @property
    def have_admins(self) -> bool:
        return any(key.is_admin for key in self.keys)

    def find_owner(self, owner: str) -> Key | None:
        return next((key for key in self.keys if key.owner == owner), None)

    def find(self, text: str) -> Key | None:
        """Finds a key; takes as long for any text."""
        digest, found = digest_key(text), None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


class KeySource:
    """The keys as their files have them now. Looks at the files at most once in PAUSE seconds.

    Logs a file that is wrong or gone and leaves the keys as they were; also a file in writing, whose last line has no
    end or which changes while it is read. Raises ConfigError from the first `read_keys`.
    """

    def __init__(
        self, config: AuthConfig, environment: Mapping[str, str], clock: Callable[[], float] = monotonic
    ) -> None:
        self._config = config
        self._environment = environment
        self._clock = clock
        self._state = self._read_state()
        self._looked = clock()
        self._keys = read_keys(config, environment)

    def __call__(self) -> Keys:
        if any(key_files(self._config).values()) and (now := self._clock()) >= self._looked + PAUSE:
            self._looked = now
            if (state := self._read_state()) != self._state:
                self._state = state
                self._read()
        return self._keys

    def _read_state(self) -> list[tuple[int, int, int] | None]:
        """Returns the states of the files; None for one that is not there."""
        return [_find_state(path) for path in key_files(self._config).values()]

    def _read(self) -> None:
        try:
            self._keys = read_keys(self._config, self._environment)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("there are %d API keys now", len(self._keys.keys))


def key_files(config: AuthConfig) -> dict[str, str]:
    """Returns the files by their configuration keys; empty where there is none."""
    return {API: config.api_keys, ADMIN: config.admin_keys}


def _find_state(path: str) -> tuple[int, int, int] | None:
    try:
        return _stat(path)
    except (OSError, ValueError):
        return None


def _stat(path: str | Path) -> tuple[int, int, int]:
    """Returns what changes when the file changes."""
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def digest_key(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def read_keys(config: AuthConfig, environment: Mapping[str, str]) -> Keys:
    """Raises ConfigError that names the configuration key or the variable."""
    keys: list[Key] = []
    for source, path in key_files(config).items():
        found = [*_read_file(Path(path), source)] if path else []
        found += _read_variable(VARIABLES[source], environment.get(VARIABLES[source], ""))
        keys += [replace(key, is_admin=source == ADMIN) for key in found]
        for what in ("digest", "name"):
            if len({getattr(key, what) for key in keys}) < len(keys):
                raise ConfigError(f"{source}: two keys have the same {'name' if what == 'name' else 'text'}")
    return Keys(tuple(keys))


def _read_variable(name: str, given: str) -> Iterator[Key]:
    texts = [text for text in re.split(r"[,\s]+", given) if text]
    if given and not texts:
        raise ConfigError(f"{name}: there are no keys in it; unset it to ask for none")
    for number, text in enumerate(texts, 1):
        yield _make_key(text, f"{name}-{number}", f"{name}, key {number}", {}, is_named=False)


def _read_file(path: Path, source: str) -> Iterator[Key]:
    if path.is_fifo():  # reading a pipe could take for ever
        raise ConfigError(f"{source}: {path}: a pipe, not a file")
    try:
        before = _stat(path)
        text = path.read_text(encoding="utf-8")
        after = _stat(path)
    except OSError as error:
        raise ConfigError(f"{source}: {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, ValueError):
        raise ConfigError(f"{source}: {path}: not a text file") from None
    if before != after:
        raise ConfigError(f"{source}: {path} changed while it was read")
    lines = text.splitlines()
    if text and not text.endswith("\n"):  # a file in writing may end with a part of a key
        raise ConfigError(
            f"{source}: {path}, line {len(lines)}: it has no end, as in a file that is half written: "
            "end each line with a newline"
        )
    rows = [(number, list(takewhile(_is_content, line.split()))) for number, line in enumerate(lines, 1)]
    if not any(words for _, words in rows):
        raise ConfigError(f"{source}: {path} has no keys: expected one a line")
    for number, words in rows:
        if words:
            # The lines of both files have names of their own.
            name = f"admin-line-{number}" if source == ADMIN else f"line-{number}"
            yield _parse_line(words, name, f"{source}: {path}, line {number}")


def _is_content(word: str) -> bool:
    """Tells whether a word does not begin a comment."""
    return not word.startswith("#")


def _parse_line(words: list[str], default: str, where: str) -> Key:
    """Parses `KEY [NAME] [max_requests=N] [max_held_tokens=N] [max_waiting=N] [metrics=all]`.

    default: the name where there is none.
    """
    text, *rest = words
    sees_all = _SEES_ALL in rest
    rest = [word for word in rest if word != _SEES_ALL]
    is_named = bool(rest) and "=" not in rest[0]
    name = rest.pop(0) if is_named else default
    limits: dict[str, int] = {}
    for word in rest:
        limit, _, value = word.partition("=")
        if limit not in _LIMITS or not (value.isascii() and value.isdecimal() and len(value) <= 18):
            raise ConfigError(f"{where}: expected KEY [NAME] [{'=N] ['.join(_LIMITS)}=N] [{_SEES_ALL}]")
        limits[limit] = int(value)
    return _make_key(text, name, where, limits, is_named=is_named, sees_all=sees_all)


def _make_key(
    text: str, name: str, where: str, limits: Mapping[str, int], *, is_named: bool, sees_all: bool = False
) -> Key:
    if len(text) < MIN_LENGTH or not _KEY.fullmatch(text):
        raise ConfigError(f"{where}: a key has at least {MIN_LENGTH} characters, all of them visible ASCII")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has 1 to 64 letters, digits, dots, dashes and underscores")
    max_requests, max_tokens, max_waiting = (limits.get(limit) for limit in _LIMITS)
    return Key(digest_key(text), name, max_requests, max_tokens, max_waiting, is_named, sees_all)
