"""CURVE keys (RFC 26) in files, as pyzmq's own tools write them: NAME.key is public, NAME.key_secret is not.

Knows no configuration and no messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

logger = logging.getLogger(__name__)


class KeyFileError(ValueError):
    """A key file is missing or wrong; the message names it."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One side's keys, 40 characters of Z85 each."""

    public: bytes
    secret: bytes


def make_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Create `folder` with a new NAME.key and a private NAME.key_secret. Raises KeyFileError if they exist already."""
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    for path in (public, secret):
        if path.exists():
            raise KeyFileError(f"{path} exists already")
    before = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        zmq.auth.create_certificates(folder, name)
        public.chmod(0o644)
    except OSError as error:
        raise KeyFileError(f"{folder}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    return public, secret


def read_pair(path: Path) -> KeyPair:
    """Read the keys of a NAME.key_secret. Raises KeyFileError."""
    public, secret = _read(path)
    if secret is None:
        raise KeyFileError(f"{path} has no secret key: it should be a NAME.key_secret")
    return KeyPair(public, secret)


def read_public(path: Path) -> bytes:
    """Read the public key of a NAME.key. Raises KeyFileError."""
    return _read(path)[0]


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path}: {error}") from None
    if len(public) != 40 or (secret is not None and len(secret) != 40):
        raise KeyFileError(f"{path}: a key has 40 characters")
    return public, secret


def check_clients(folder: Path) -> None:
    """Raise KeyFileError unless the folder has public keys (`*.key`), all of them readable."""
    paths = sorted(folder.glob("*.key"))
    if not paths:
        raise KeyFileError(f"{folder} has no *.key files: the public keys of the clients that may connect")
    for path in paths:
        read_public(path)


State = tuple[tuple[str, int, int, int], ...]  # of each file: name, inode, size, time of change


class Clients:
    """The public keys in a folder, checked for changes whenever a client connects.

    An unreadable file admits nobody, and does not keep others out.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state: State | None = None
        self._keys: frozenset[bytes] = frozenset()

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether the client is admitted; called by pyzmq."""
        state = self._newest()
        if state != self._state:
            self._state = state
            self._keys = frozenset(found for name, *_ in state if (found := self._read(name)))
        return key in self._keys

    def _newest(self) -> State:
        found = []
        for path in sorted(self._folder.glob("*.key")):
            with contextlib.suppress(OSError):  # it is being removed
                stat = path.stat()
                found.append((path.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(found)

    def _read(self, name: str) -> bytes:
        try:
            return read_public(self._folder / name)
        except KeyFileError as error:
            logger.error("the key of a client is passed over: %s", error)
            return b""


class Gate:
    """Admits clients with these keys only (ZAP, RFC 27). Needs a running event loop.

    Args:
        clients: a folder of public keys; changes count from the next connection on.
    """

    def __init__(self, context: zmq.Context[Any], clients: Path) -> None:
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=Clients(clients))

    def close(self) -> None:
        self._authenticator.stop()
