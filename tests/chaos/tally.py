"""What became of all that was begun. Each item ends once, with one of its outcomes; what must not be is noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MOST_FAULTS = 200
REFUSED = "not accepted"  # the outcome of what was told at once to come again


class Item:
    """Something that was begun. `end` is called once."""

    def __init__(self, tally: Tally, kind: str) -> None:
        self._tally = tally
        self.kind = kind
        self.outcome: str | None = None

    def end(self, outcome: str) -> None:
        if self.outcome is not None:
            self._tally.fault(f"{self.kind} ended twice: {self.outcome}, then {outcome}")
            return
        self.outcome = outcome
        self._tally.ends[self.kind, outcome] += 1

    def wrong(self, message: str) -> None:
        """It ended as nothing may."""
        self._tally.fault(f"{self.kind}: {message}")
        self.end("WRONG")


@dataclass(slots=True)
class Tally:
    """begun: items by kind. ends: by kind and outcome. kills: by what was done to whom. faults: what must not be."""

    begun: Counter[str] = field(default_factory=Counter)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @contextmanager
    def item(self, kind: str) -> Iterator[Item]:
        """One that ends within the context, whatever is raised."""
        item = self.begin(kind)
        try:
            yield item
        except BaseException as error:
            if item.outcome is None:
                item.wrong(f"{type(error).__name__}: {error}")
            raise

        if item.outcome is None:
            item.wrong("no end")

    def begin(self, kind: str) -> Item:
        self.begun[kind] += 1
        return Item(self, kind)

    def fault(self, message: str) -> None:
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(message)

    @property
    def num_items(self) -> int:
        return self.begun.total()

    @property
    def num_open(self) -> int:
        return self.begun.total() - self.ends.total()

    @property
    def num_wrong(self) -> int:
        return sum(count for (_, outcome), count in self.ends.items() if outcome == "WRONG")

    @property
    def num_lost(self) -> int:
        """Begun and not ended, or ended wrongly."""
        return self.num_open + self.num_wrong

    def figures(self) -> dict[str, object]:
        """For people and programs."""
        kinds = {
            kind: {outcome: count for (of, outcome), count in sorted(self.ends.items()) if of == kind}
            for kind in sorted(self.begun)
        }
        return {
            "items": self.num_items,
            "accepted": self.num_items - sum(count for (_, outcome), count in self.ends.items() if outcome == REFUSED),
            "lost": self.num_lost,
            "kills": dict(sorted(self.kills.items())),
            "ends": kinds,
            "faults": self.faults,
        }
