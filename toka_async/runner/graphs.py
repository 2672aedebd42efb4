"""CUDA graphs of decoding steps: everything from the rows' tables to their next tokens, replayed as one launch.

A graph is of a number of rows, filled up with padding, with or without shared prefixes. It reads and writes the tables
of `DeviceRows` where they are, so that a replay needs no inputs. Knows no requests and no messages.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from toka_async.attention.base import GraphAttention, PrefixGroup

# What a captured step computes: from (rows, grouped) to tensors of as many rows.
DecodeStep = Callable[[int, bool], tuple[Tensor, ...]]
# Makes of what one rank measured what all ranks of a stage go by.
Agree = Callable[[bytes], bytes]

_REPLAYS = 3  # of a graph that is timed


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]


def graph_sizes(most: int) -> list[int]:
    """Rows of the graphs up to `most`.

    Padding costs little while a step's time is that of reading the weights, to about 150 rows; above, sizes are whole
    tiles of matrix products.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(64, sizes[-1] // 512 * 64))
    return sorted({min(size, most) for size in sizes})


class DecodeGraphs:
    """Graphs by number of rows, largest captured first, so that they share its memory.

    Libraries' matrix products are not always faster for being smaller (448 rows of an 8B model took 13.6 ms on an H200,
    512 took 10.2): a graph is kept if it beats all larger ones.
    """

    def __init__(
        self,
        decode: DecodeStep,
        attention: GraphAttention,
        sizes: Sequence[int],
        grouped: bool,
        agree: Agree = bytes,
        choose: bool = True,
    ) -> None:
        """choose: time the graphs and drop those that a larger one beats; False: that was done to the sizes before."""
        self._attention = attention
        self._sizes = sorted(sizes)
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        self._decode = decode
        self._agree = agree
        self._choose = choose
        self._kinds = (False, True) if grouped else (False,)

    def capture(self) -> Iterator[tuple[int, int]]:
        """Captures one graph after the other; gives (captured, all) after each."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        todo = [(size, grouped) for size in reversed(self._sizes) for grouped in self._kinds]
        with _quick_collections():
            for number, (size, grouped) in enumerate(todo, 1):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._decode(size, grouped)  # what happens once (kernels, libraries' handles) is not captured
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with _no_collection(), torch.cuda.graph(graph, pool=pool, stream=stream):
                    outputs = self._decode(size, grouped)
                self._graphs[size, grouped] = _Captured(graph, outputs)
                yield number, len(todo)
        if self._choose:
            self._keep(fastest(self._sizes, self._times()))

    def _times(self) -> list[float]:
        """Milliseconds of all kinds of each size, as all ranks go by."""
        times = [sum(_milliseconds(self._graphs[size, kind].graph) for kind in self._kinds) for size in self._sizes]
        return msgspec.json.decode(self._agree(msgspec.json.encode(times)), type=list[float])

    def _keep(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] in sizes}

    @property
    def sizes(self) -> list[int]:
        """Rows of the graphs that there are, in ascending order."""
        return [*self._sizes] if self._graphs else []

    def size_for(self, num_rows: int) -> int:
        """Rows of the smallest graph that holds them; 0: there is none."""
        return next((size for size in self._sizes if size >= num_rows), 0) if self._graphs else 0

    def has(self, num_rows: int, grouped: bool) -> bool:
        """Whether so many rows, with groups or without, can be replayed."""
        return (self.size_for(num_rows), grouped) in self._graphs

    def replay(self, num_rows: int, groups: tuple[PrefixGroup, ...]) -> tuple[Tensor, ...]:
        """What the step gives of the rows, until the next replay; the order's padding fills the graph's size."""
        size = self.size_for(num_rows)
        captured = self._graphs[size, bool(groups)]
        if groups:
            self._attention.set_groups(groups)
        captured.graph.replay()
        return tuple(output[:num_rows] for output in captured.outputs)


def fastest(sizes: Sequence[int], times: Sequence[float]) -> list[int]:
    """Those of the ascending sizes that take less time than every larger one."""
    kept: list[int] = []
    best = math.inf
    for size, milliseconds in zip(reversed(sizes), reversed(times), strict=True):
        if milliseconds < best:
            kept.append(size)
            best = milliseconds
    return kept[::-1]


def _milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of a replay, the shortest of some; the first one of all is not counted."""
    times = []
    for _ in range(1 + _REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times[1:])


@contextmanager
def _quick_collections() -> Iterator[None]:
    """What is there already is not looked at: libraries' hundreds of thousands of objects live on anyway."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection during a capture could free memory of another stream."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
