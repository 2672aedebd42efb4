"""What goes wrong when tensors are transferred."""

from __future__ import annotations


class TransferError(Exception):
    """Tensors cannot be transferred; the message says why."""


class TransferTimeoutError(TransferError):
    """The other end did not do its part in time."""
