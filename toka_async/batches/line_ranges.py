"""The done lines of a file as ranges, with the byte at which each range ends.

There are never more ranges than lines that ran at once, however long the file is. Knows nothing of what a line says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Gap:
    """The lines `first` up to but not including `stop`, which are not done; the first begins at byte `offset`."""

    first: int
    stop: int
    offset: int


@dataclass(slots=True)
class LineRanges:
    """Ranges of done lines, in order, none touching the next: `starts[i]` up to but not including `stops[i]`.

    ends: the byte after each range's last line, where the next line begins.
    """

    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        return sum(self.stops) - sum(self.starts)

    def add(self, line: int, end: int) -> None:
        """Marks the line as done; the next line begins at byte `end`."""
        after = bisect_right(self.starts, line)  # the first range after the line
        assert not after or self.stops[after - 1] <= line, f"line {line} is done twice"
        joins_before = after > 0 and self.stops[after - 1] == line
        joins_after = after < len(self.starts) and self.starts[after] == line + 1
        if joins_before and joins_after:
            self.stops[after - 1], self.ends[after - 1] = self.stops[after], self.ends[after]
            del self.starts[after], self.stops[after], self.ends[after]
        elif joins_before:
            self.stops[after - 1], self.ends[after - 1] = line + 1, end
        elif joins_after:
            self.starts[after] = line
        else:
            self.starts.insert(after, line)
            self.stops.insert(after, line + 1)
            self.ends.insert(after, end)

    def gaps(self, total: int) -> Iterator[Gap]:
        """Yields the lines that are left of a file of `total` lines."""
        first, offset = 0, 0
        for start, stop, end in zip(self.starts, self.stops, self.ends, strict=True):
            if first < start:
                yield Gap(first, start, offset)
            first, offset = stop, end
        if first < total:
            yield Gap(first, total, offset)

    def encode(self) -> bytes:
        return np.array([self.starts, self.stops, self.ends], "<i8").tobytes()

    @staticmethod
    def decode(data: bytes) -> LineRanges:
        starts, stops, ends = np.frombuffer(data, "<i8").reshape(3, -1).tolist()
        return LineRanges(starts, stops, ends)
