"""A queue of several owners: first in, first out within an owner; round-robin between owners.

An owner with many items does not delay others. Work per event. Knows names of owners, and nothing of the items.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}  # in the order of the owners' turns; none is empty

    def __bool__(self) -> bool:
        return bool(self._lines)

    def put(self, owner: str, item: T) -> None:
        self._lines.setdefault(owner, deque()).append(item)

    def take(self) -> T:
        """Take the first item of the owner whose turn it is; its next turn is after all others'."""
        owner = next(iter(self._lines))
        line = self._lines.pop(owner)
        item = line.popleft()
        if line:
            self._lines[owner] = line
        return item
