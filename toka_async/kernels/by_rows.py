"""A choice for each number of rows."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class ByRows(Generic[T]):
    """For up to sizes[i] rows, more than sizes[i - 1], the i-th choice; sizes in ascending order."""

    sizes: list[int]
    choices: list[T]

    def find(self, num_rows: int) -> T | None:
        """None for no rows, and for more than there are choices for."""
        return self.choices[bisect_left(self.sizes, num_rows)] if 0 < num_rows <= self.sizes[-1] else None
