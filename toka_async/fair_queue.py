"""A queue of several owners: in order within an owner, in turn between owners.

Nobody's many stand before another's one. Work per event. Knows names of owners, and nothing of what waits.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """What waits."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}  # in the order of the owners' turns; none is empty

    def __bool__(self) -> bool:
        return bool(self._lines)

    def put(self, owner: str, item: T) -> None:
        """The last of its owner."""
        self._lines.setdefault(owner, deque()).append(item)

    def take(self) -> T:
        """The first of the owner whose turn it is; that owner's next turn is after all others'."""
        owner = next(iter(self._lines))
        line = self._lines.pop(owner)
        item = line.popleft()
        if line:
            self._lines[owner] = line
        return item
