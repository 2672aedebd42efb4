"""The errors of a request."""

from __future__ import annotations


class RequestError(Exception):
    """The server refuses the request, or cannot finish it.

    Args:
        message: for people.
        field: the field at fault, if any.
        status: as in HTTP: 400 for wrong input, 500 when the engine has stopped.
        code: for programs.
    """

    def __init__(self, message: str, *, field: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.status = status
        self.code = code


class CommandError(Exception):
    """The engine refuses a command, or could not carry it out."""


class ConnectionLostError(Exception):
    """There is no connection to the server, or the server lost the session of a begun stream."""


class ReplicaLostError(ConnectionLostError):
    """A replica of a pool was lost after it had delivered a part of a stream, or as many were as a request may lose."""
