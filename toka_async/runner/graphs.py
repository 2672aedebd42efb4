"""CUDA graphs of decoding steps: everything from the rows' tables to their next tokens, replayed as one launch.

A graph computes a fixed number of rows, filled up with padding, with or without shared prefixes. It reads and writes
the tables of `DeviceRows` in place, so a replay needs no inputs. Knows no requests and no messages.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from toka_async.attention.base import CapturedAttention, PrefixGroup

# Computes a step of (rows, grouped). Returns tensors of as many rows.
DecodeStep = Callable[[int, bool], tuple[Tensor, ...]]


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]


def list_graph_sizes(most: int) -> list[int]:
    """Lists the numbers of rows to capture, up to `most`, before any is dropped.

    Padding costs little while reading the weights takes the time, to about 150 rows. Above, products have whole tiles.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(64, sizes[-1] // 512 * 64))
    return sorted({min(size, most) for size in sizes})


class DecodeGraphs:
    """Graphs by number of rows. The largest is captured first, so that the others share its memory."""

    def __init__(self, decode: DecodeStep, attention: CapturedAttention, sizes: Sequence[int], grouped: bool) -> None:
        self._attention = attention
        self._sizes = sorted(sizes)
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        self._decode = decode
        self._kinds = (False, True) if grouped else (False,)

    def capture(self) -> Iterator[tuple[int, int]]:
        """Captures one graph after the other; yields (captured, all) after each."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        todo = [(size, grouped) for size in reversed(self._sizes) for grouped in self._kinds]
        with _hide_old_objects():
            for number, (size, grouped) in enumerate(todo, 1):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._decode(size, grouped)  # what happens once (kernels, libraries' handles) is not captured
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with _hold_collections(), torch.cuda.graph(graph, pool=pool, stream=stream):
                    outputs = self._decode(size, grouped)
                self._graphs[size, grouped] = _Captured(graph, outputs)
                yield number, len(todo)

    def keep(self, sizes: Sequence[int]) -> None:
        self._sizes = [size for size in self._sizes if size in sizes]
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] in sizes}

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows of the captured graphs, in ascending order."""
        return [*self._sizes] if self._graphs else []

    def list_graphs(self, size: int) -> list[torch.cuda.CUDAGraph]:
        """Lists the graphs of this number of rows, without groups and with them."""
        return [self._graphs[size, grouped].graph for grouped in self._kinds]

    def find_size(self, num_rows: int) -> int:
        """Finds the size of the smallest graph that holds the rows; 0 if there is none."""
        return next((size for size in self._sizes if size >= num_rows), 0) if self._graphs else 0

    def has(self, num_rows: int, grouped: bool) -> bool:
        """Tells whether a graph can compute so many rows, with groups or without."""
        return (self.find_size(num_rows), grouped) in self._graphs

    def replay(self, num_rows: int, groups: tuple[PrefixGroup, ...]) -> tuple[Tensor, ...]:
        """Replays the step. Returns the rows' outputs, which hold until the next replay. Padding fills the order."""
        size = self.find_size(num_rows)
        captured = self._graphs[size, bool(groups)]
        if groups:
            self._attention.set_groups(groups)
        captured.graph.replay()
        return tuple(output[:num_rows] for output in captured.outputs)


@contextmanager
def _hide_old_objects() -> Iterator[None]:
    """Keeps existing objects out of garbage collections: libraries' hundreds of thousands of objects live on anyway."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _hold_collections() -> Iterator[None]:
    """Collects no garbage within: a collection during a capture could free memory of another stream."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
