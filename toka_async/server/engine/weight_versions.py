"""Names of versions of the weights as small numbers, which columns hold."""

from __future__ import annotations

from collections.abc import Iterable

from toka_async.arrays import Int32
from toka_async.control import DEFAULT_VERSION


class WeightVersions:
    """Names by number, in the order in which they came."""

    def __init__(self) -> None:
        self.names = [DEFAULT_VERSION]
        self._numbers = {DEFAULT_VERSION: 0}

    def number_all(self, names: Iterable[str]) -> list[int]:
        """Returns the number of each name; a new name gets the next one."""
        return [self._number(name) for name in names]

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number


def list_spans(versions: Int32) -> list[tuple[int, int, int]]:
    """Returns where tokens of one version begin and end, and its number; together they cover all tokens once."""
    if not versions.size:
        return []
    starts = [0, *((versions[1:] != versions[:-1]).nonzero()[0] + 1).tolist()]
    ends = [*starts[1:], versions.size]
    return [(start, end, int(versions[start])) for start, end in zip(starts, ends, strict=True)]
