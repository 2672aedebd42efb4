"""Chooses which decoding steps are captured in graphs, by their numbers of rows.

A graph pays as long as the host takes longer to launch a step than the device to compute it. And it must beat all
larger ones: on an H200, 448 rows of an 8B model took 13.6 ms, 512 took 10.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, ClassVar

import torch

from toka_async.bar import Show
from toka_async.runner.decode import DecodePass
from toka_async.runner.graphs import DENSE_ROWS, list_graph_sizes
from toka_async.tuning.clock import HEAD_START, time_calls, time_host
from toka_async.tuning.store import Facts

_REPLAYS = 3  # replays that are timed
_MOST_CYCLES = 3e9  # of a device in a second


@dataclass(slots=True, frozen=True)
class GraphLimit:
    """The `Choice` of the rows of the largest graph, of more than DENSE_ROWS and up to `most`.

    Above, the device takes longer than the host, which then launches steps in time without graphs. The padding that is
    measured has next to no keys, so that rather too many sizes are captured than too few. model: see `GraphChoice`.
    """

    decode: DecodePass
    most: int
    model: Facts
    name: ClassVar[str] = "graph-rows"
    kind: ClassVar[Any] = int

    def describe(self) -> Facts:
        return {**self.model, "graph_rows": self.most}

    def admits(self, answer: int) -> bool:
        return answer in (DENSE_ROWS, *self._list_sizes())

    @torch.inference_mode()
    def measure(self) -> int:
        """Measures every size: ranks that exchange tensors in a step must compute the same steps."""
        self.decode.fill(self.most)
        sizes = self._list_sizes()
        faster = [size for size in sizes if self._is_faster(partial(self.decode.compute_padding, size))]
        return max(faster, default=DENSE_ROWS)

    def _is_faster(self, step: Callable[[], None]) -> bool:
        """Tells whether the device takes less time for a step than the host to launch it."""
        step()
        host = time_host(step)
        waits = math.ceil(host * _MOST_CYCLES / HEAD_START)  # the device begins when all is launched
        return time_calls(step, head_start=waits) < 1000 * host

    def _list_sizes(self) -> list[int]:
        return [size for size in list_graph_sizes(self.most) if size > DENSE_ROWS]


@dataclass(slots=True, frozen=True)
class GraphChoice:
    """The `Choice` of the sizes of graphs up to `most` rows.

    least_grouped: see `DecodeGraphs`. model: what else the times of graphs depend on.
    """

    decode: DecodePass
    most: int
    least_grouped: int
    model: Facts
    show: Show
    name: ClassVar[str] = "graphs"
    kind: ClassVar[Any] = list[int]

    def describe(self) -> Facts:
        return {**self.model, "graphs": [self.most, self.least_grouped]}

    def admits(self, answer: Sequence[int]) -> bool:
        candidates = list_graph_sizes(self.most)
        return bool(answer) and answer[-1] == self.most and list(answer) == [n for n in candidates if n in answer]

    @torch.inference_mode()
    def measure(self) -> list[int]:
        self._capture(list_graph_sizes(self.most))
        graphs = self.decode.graphs
        assert graphs is not None
        return find_kept(graphs.sizes, [fmean(map(_time_replay, graphs.list_replays(size))) for size in graphs.sizes])

    def use(self, answer: Sequence[int]) -> None:
        if self.decode.graphs is None:
            self._capture(answer)
        else:
            self.decode.graphs.keep(answer)

    def _capture(self, sizes: Sequence[int]) -> None:
        for done, total in self.decode.capture(sizes, self.least_grouped):
            self.show(done, total, "graphs captured")


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
