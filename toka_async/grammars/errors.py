"""What is wrong with a grammar."""

from __future__ import annotations


class GrammarError(ValueError):
    """A grammar cannot be used; the message says why, in one line."""
