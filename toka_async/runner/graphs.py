"""CUDA graphs of decoding steps: one from the rows' tables to the model's outputs, and one for each way to go on.

A graph computes a fixed number of rows, filled up with padding, with or without shared prefixes. It reads and writes
the tables of `DeviceRows` in place, so a replay needs no inputs. The ways to go on, the ends, are captured apart: a
step replays the one that its rows need, and the model is captured once. An end of several links is a graph for each,
so that the host can do something before the last. Knows no requests and no messages.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from toka_async.attention.base import CapturedAttention, PrefixGroup

# Computes a step of (rows, grouped). Returns tensors of as many rows.
DecodeStep = Callable[[int, bool], tuple[Tensor, ...]]
# Goes on from what a step, or the link before, returned. Returns tensors of as many rows.
DecodeLink = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
DecodeEnd = Sequence[DecodeLink]


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]


@dataclass(slots=True)
class _CapturedStep:
    """A step, and its ends by name. Outputs that the next link alone reads are not kept."""

    step: _Captured
    ends: dict[str, list[_Captured]]

    def replay(self, end: str | None, between: Callable[[], None] | None = None) -> tuple[Tensor, ...]:
        self.step.graph.replay()
        if end is None:
            return self.step.outputs
        *links, last = self.ends[end]
        for link in links:
            link.graph.replay()
        if between is not None:
            between()
        last.graph.replay()
        return last.outputs


DENSE_ROWS = 512  # up to which sizes lie close together


def list_graph_sizes(most: int) -> list[int]:
    """Lists the numbers of rows to capture, up to `most`, before any is dropped.

    Padding costs little while reading the weights takes the time, to about 150 rows. Above, products have whole tiles.
    From DENSE_ROWS on there are four sizes for each doubling, since each takes time at the start.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (64 if sizes[-1] < DENSE_ROWS else 1 << (sizes[-1].bit_length() - 3)))
    return sorted({min(size, most) for size in sizes})


class DecodeGraphs:
    """Graphs by number of rows. The largest is captured first, so that the others share its memory.

    ends: by name; the first is the usual one. Without any, a step's outputs are the results.
    """

    def __init__(
        self,
        decode: DecodeStep,
        ends: Mapping[str, DecodeEnd],
        attention: CapturedAttention,
        sizes: Sequence[int],
        least_grouped: int,
        rehearse: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """least_grouped: rows of the smallest step with groups; 0: none has any.

        rehearse: within it, `decode` launches every kernel of a step at least once, and its results are not used.
        """
        self._attention = attention
        self._sizes = sorted(sizes)
        self._graphs: dict[tuple[int, bool], _CapturedStep] = {}
        self._dropped: list[_CapturedStep] = []
        self._decode = decode
        self._ends = ends
        self._rehearse = rehearse
        self._least_grouped = least_grouped

    def capture(self) -> Iterator[tuple[int, int]]:
        """Captures one step after the other, each with its ends; yields (captured, all) after each."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        todo = [(size, grouped) for size in reversed(self._sizes) for grouped in self._list_kinds(size)]
        with _hold_collections():
            for number, (size, grouped) in enumerate(todo, 1):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream), self._rehearse():
                    # What happens once (kernels, libraries' handles) is not captured.
                    outputs = self._decode(size, grouped)
                    for end in self._ends.values():
                        reduce(lambda linked, link: link(linked), end, outputs)
                torch.cuda.current_stream().wait_stream(stream)
                gc.collect(0)  # what the capture before left, which may hold the graphs' memory
                step = _capture(partial(self._decode, size, grouped), pool, stream)
                ends = {name: _capture_links(step, end, pool, stream) for name, end in self._ends.items()}
                if ends:
                    # An end follows its step at once: later captures may take the memory between the two.
                    step.outputs = ()
                self._graphs[size, grouped] = _CapturedStep(step, ends)
                yield number, len(todo)

    def launch(self) -> None:
        """Launches every step, and each of its ends, once: a graph's first launch takes longer. No row may run."""
        for captured in self._graphs.values():
            for part in (captured.step, *chain.from_iterable(captured.ends.values())):
                part.graph.replay()

    def keep(self, sizes: Sequence[int]) -> None:
        """Leaves out other sizes from now on.

        Their graphs stay: where torch destroys one, it frees cuBLAS' workspace of the stream that all were captured on,
        which the others use (pytorch#193402).
        """
        self._sizes = [size for size in self._sizes if size in sizes]
        self._dropped += [graph for key, graph in self._graphs.items() if key[0] not in sizes]
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] in sizes}

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows of the captured graphs, in ascending order."""
        return [*self._sizes] if self._graphs else []

    def list_replays(self, size: int) -> list[Callable[[], object]]:
        """Lists what replays steps of this number of rows with the usual end, without groups and, if any, with them."""
        usual = next(iter(self._ends), None)
        return [partial(self._graphs[size, grouped].replay, usual) for grouped in self._list_kinds(size)]

    def find_size(self, num_rows: int) -> int:
        """Finds the size of the smallest graph that holds the rows; 0 if there is none."""
        return next((size for size in self._sizes if size >= num_rows), 0) if self._graphs else 0

    def has(self, num_rows: int, grouped: bool) -> bool:
        """Tells whether a graph can compute so many rows, with groups or without."""
        return (self.find_size(num_rows), grouped) in self._graphs

    def replay(
        self,
        num_rows: int,
        groups: tuple[PrefixGroup, ...],
        end: str | None = None,
        between: Callable[[], None] | None = None,
    ) -> tuple[Tensor, ...]:
        """Replays the step and one of its ends, if it has any. Padding fills the order.

        between: called when all is launched but the end's last link. It may use no memory of graphs.

        Returns the rows' outputs, which hold until the next replay.
        """
        captured = self._graphs[self.find_size(num_rows), bool(groups)]
        if groups:
            self._attention.set_groups(groups)
        return tuple(output[:num_rows] for output in captured.replay(end, between))

    def _list_kinds(self, size: int) -> list[bool]:
        """Lists whether there are groups in the steps of this number of rows."""
        return [False, True] if 0 < self._least_grouped <= size else [False]


def _capture(compute: Callable[[], tuple[Tensor, ...]], pool: Any, stream: torch.cuda.Stream) -> _Captured:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        outputs = compute()
    return _Captured(graph, outputs)


def _capture_links(step: _Captured, end: DecodeEnd, pool: Any, stream: torch.cuda.Stream) -> list[_Captured]:
    captured: list[_Captured] = []
    for link in end:
        before = captured[-1] if captured else step
        captured.append(_capture(partial(link, before.outputs), pool, stream))
    for inner in captured[:-1]:
        inner.outputs = ()
    return captured


@contextmanager
def _hold_collections() -> Iterator[None]:
    """Collects garbage first. Python collects none within: in a capture, that could free memory of another stream."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
