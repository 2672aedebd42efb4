"""Why the engine may refuse what the server asks of it."""

from __future__ import annotations


class NotServingError(Exception):
    """No requests are taken: the engine is not ready yet, draining, or gone. The message says which."""


class OverloadedError(Exception):
    """As many requests or tokens as are allowed are held already."""
