"""Chooses the graphs to keep, by their numbers of rows: those that beat all larger ones.

Smaller matrix products are not always faster: on an H200, 448 rows of an 8B model took 13.6 ms, 512 took 10.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from toka_async.runner.decode import DecodePass
from toka_async.runner.graphs import list_graph_sizes
from toka_async.tuning.clock import time_calls
from toka_async.tuning.store import Facts

_REPLAYS = 3  # replays that are timed


@dataclass(slots=True, frozen=True)
class GraphChoice:
    """The `Choice` of the sizes of graphs up to `most` rows, with groups or without.

    model: what else the times of graphs depend on. show: (graphs captured, all).
    """

    decode: DecodePass
    most: int
    grouped: bool
    model: Facts
    show: Callable[[int, int], None]
    name: ClassVar[str] = "graphs"
    kind: ClassVar[Any] = list[int]

    def describe(self) -> Facts:
        return {**self.model, "graphs": [self.most, self.grouped]}

    def admits(self, answer: Sequence[int]) -> bool:
        candidates = list_graph_sizes(self.most)
        return bool(answer) and answer[-1] == self.most and list(answer) == [n for n in candidates if n in answer]

    @torch.inference_mode()
    def measure(self) -> list[int]:
        self._capture(list_graph_sizes(self.most))
        graphs = self.decode.graphs
        assert graphs is not None
        return find_kept(graphs.sizes, [sum(map(_time_replay, graphs.list_replays(size))) for size in graphs.sizes])

    def use(self, answer: Sequence[int]) -> None:
        if self.decode.graphs is None:
            self._capture(answer)
        else:
            self.decode.graphs.keep(answer)

    def _capture(self, sizes: Sequence[int]) -> None:
        for done, total in self.decode.capture(sizes, self.grouped):
            self.show(done, total)


def find_kept(sizes: Sequence[int], times: Sequence[float]) -> list[int]:
    """Finds those of the ascending sizes that take less time than every larger one."""
    kept: list[int] = []
    best = math.inf
    for size, milliseconds in zip(reversed(sizes), reversed(times), strict=True):
        if milliseconds < best:
            kept.append(size)
            best = milliseconds
    return kept[::-1]


def _time_replay(replay: Callable[[], object]) -> float:
    """Times replays, in milliseconds. Returns the shortest; the first one does not count."""
    replay()
    return min(time_calls(replay) for _ in range(_REPLAYS))
