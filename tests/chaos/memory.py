"""Memory of processes over time: whether it stays what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from tests.chaos.leaks import Use

LEAST_POINTS = 12
MOST_SHARE, MOST_BYTES = 0.1, 8 << 20  # that it may grow from the first third to the last


@dataclass(slots=True)
class Memory:
    """points: of each process (name and id), since `forget`: (seconds, bytes)."""

    points: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=dict)

    def take(self, now: float, uses: Mapping[str, Use]) -> None:
        for name, use in uses.items():
            self.points.setdefault((name, use.pid), []).append((now, use.memory))

    def forget(self) -> None:
        self.points.clear()

    def figures(self, uses: Mapping[str, Use]) -> dict[str, dict[str, float]]:
        """Of the processes that still live and were seen for long enough: MiB at first and at last, and the minutes."""
        found = {}
        for name, use in uses.items():
            points = self.points.get((name, use.pid), [])
            if len(points) >= LEAST_POINTS:
                third = len(points) // 3
                found[name] = {
                    "minutes": round((points[-1][0] - points[0][0]) / 60, 1),
                    "first_mib": round(median(size for _, size in points[:third]) / 2**20, 1),
                    "last_mib": round(median(size for _, size in points[-third:]) / 2**20, 1),
                }
        return found


def growing(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Processes whose memory grows."""
    return [
        f"{name} grows: {each['first_mib']} MiB, then {each['last_mib']} MiB"
        for name, each in figures.items()
        if each["last_mib"] > each["first_mib"] * (1 + MOST_SHARE) + MOST_BYTES / 2**20
    ]
