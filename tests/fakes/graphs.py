"""CUDA graphs on a CPU: a capture computes nothing, a replay writes into tensors that stay where they are."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from toka_async.runner.graphs import DecodeStep


class FakeStream:
    def wait_stream(self, stream: FakeStream) -> None:
        assert isinstance(stream, FakeStream)


class FakeEvent:
    """Of the clock that replays drive."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.time = 0.0

    def record(self) -> None:
        self.time = self.clock()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.time - self.time


class FakeGraph:
    """Replays what was called while it was the graph being captured."""

    def __init__(self) -> None:
        self.body: Callable[[], None] | None = None
        self.num_replays = 0

    def replay(self) -> None:
        assert self.body is not None, "nothing was captured"
        self.num_replays += 1
        self.body()


class FakeGraphs:
    """Takes the place of `torch.cuda`'s graphs. graphs: those captured. num_collections: of garbage, not done.

    milliseconds: that replays have taken, one for each row; slow: more of them, by the number of rows.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.graphs: list[FakeGraph] = []
        self.num_collections = 0
        self._before: tuple[Tensor, ...] = ()
        patch.setattr(gc, "collect", self._collect)
        self._capturing: FakeGraph | None = None
        self.milliseconds = 0.0
        self.slow: dict[int, float] = {}
        for name, value in {
            "graph_pool_handle": lambda: (0, 0),
            "Stream": FakeStream,
            "current_stream": FakeStream,
            "stream": lambda _: nullcontext(),
            "CUDAGraph": FakeGraph,
            "graph": self._capture,
            "Event": lambda enable_timing: FakeEvent(lambda: self.milliseconds),  # noqa: ARG005
        }.items():
            patch.setattr(torch.cuda, name, value)

    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)

    def _collect(self) -> int:
        self.num_collections += 1
        return 0

    @contextmanager
    def _capture(self, graph: FakeGraph, pool: object, stream: FakeStream) -> Iterator[None]:
        assert pool == (0, 0)
        assert isinstance(stream, FakeStream)
        self._capturing = graph
        yield
        self._capturing = None
        assert graph.body is not None
        self.graphs.append(graph)

    def capturable(self, decode: DecodeStep) -> DecodeStep:
        """The same step, and one that a capture keeps for later."""

        def step(num_rows: int, grouped: bool) -> tuple[Tensor, ...]:
            if self._capturing is None:
                self._before = decode(num_rows, grouped)
                return self._before
            # As many and as large as the run before the capture made.
            outputs = tuple(torch.full_like(output, -1) for output in self._before)

            def body() -> None:
                self.milliseconds += num_rows + self.slow.get(num_rows, 0.0)
                for output, value in zip(outputs, decode(num_rows, grouped), strict=True):
                    output.copy_(value)

            self._capturing.body = body
            return outputs

        return step
