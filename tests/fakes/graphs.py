"""CUDA graphs on a CPU: a replay writes into tensors that stay, whose sizes a capture finds by computing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import ParamSpec

import pytest
import torch
from torch import Tensor

P = ParamSpec("P")


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
    """Replays what was called while it was the graph being captured. name: of that."""

    def __init__(self) -> None:
        self.body: Callable[[], None] | None = None
        self.name = ""
        self.num_replays = 0

    def replay(self) -> None:
        assert self.body is not None, "nothing was captured"
        self.num_replays += 1
        self.body()


class FakeGraphs:
    """Takes the place of `torch.cuda`'s graphs. graphs: those captured. num_collections: of garbage, not done.

    milliseconds: that replays of steps have taken, one for each row; slow: more of them, by the number of rows.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.graphs: list[FakeGraph] = []
        self.num_collections = 0
        patch.setattr(gc, "collect", self._collect)
        self._capturing: dict[int, FakeGraph] = {}  # by thread
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

    def num_replays(self, name: str = "step") -> int:
        return sum(graph.num_replays for graph in self.graphs if graph.name == name)

    def list_steps(self) -> list[FakeGraph]:
        """The graphs of models."""
        return [graph for graph in self.graphs if graph.name == "step"]

    def _collect(self, generation: int = 2) -> int:  # noqa: ARG002
        self.num_collections += 1
        return 0

    @contextmanager
    def _capture(self, graph: FakeGraph, pool: object, stream: FakeStream) -> Iterator[None]:
        assert pool == (0, 0)
        assert isinstance(stream, FakeStream)
        self._capturing[threading.get_ident()] = graph
        yield
        del self._capturing[threading.get_ident()]
        assert graph.body is not None
        self.graphs.append(graph)

    def capturable(
        self, compute: Callable[P, tuple[Tensor, ...]], name: str = "step"
    ) -> Callable[P, tuple[Tensor, ...]]:
        """Computes the same; a capture keeps it for later."""

        def step(*args: P.args, **kwargs: P.kwargs) -> tuple[Tensor, ...]:
            values = compute(*args, **kwargs)
            graph = self._capturing.get(threading.get_ident())
            if graph is None:
                return values
            outputs = tuple(torch.full_like(value, -1) for value in values)

            def body() -> None:
                if name == "step":
                    self.milliseconds += len(outputs[0]) + self.slow.get(len(outputs[0]), 0.0)
                for output, value in zip(outputs, compute(*args, **kwargs), strict=True):
                    output.copy_(value)

            graph.body, graph.name = body, name
            return outputs

        return step
