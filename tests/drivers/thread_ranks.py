"""Tensor ranks that are threads of this process and take turns: one runs while the others wait for what it sends.

For what must not run twice at once (Triton's interpreter), and for tests too small to start processes for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from toka_async.model.comm import Comm

T = TypeVar("T")
_TIMEOUT = 60.0


def run_ranks(size: int, rank: Callable[[Comm], T]) -> list[T]:
    """What each rank of `size` returns."""
    turn, barrier = threading.Lock(), threading.Barrier(size, timeout=_TIMEOUT)
    parts: list[Tensor] = [torch.empty(0)] * size

    def run(index: int) -> T:
        with turn:
            try:
                return rank(ThreadComm(index, parts, turn, barrier))
            except BaseException:
                barrier.abort()
                raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, index) for index in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]


class ThreadComm:
    """`Comm` of a thread that holds the turn."""

    def __init__(self, rank: int, parts: list[Tensor], turn: threading.Lock, barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(parts)
        self.num_values = 0  # sent up to now
        self._parts = parts
        self._turn = turn
        self._barrier = barrier

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchange(x), dim)

    def all_to_all(self, parts: Tensor) -> Tensor:
        return torch.stack([theirs[self.rank] for theirs in self._exchange(parts)])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank]

    def minimum(self, number: int) -> int:
        return int(torch.stack(self._exchange(torch.tensor(number))).min())

    def agree(self, value: T, kind: Any) -> T:
        data = torch.tensor(list(msgspec.json.encode(value)), dtype=torch.uint8)
        agreed: T = msgspec.json.decode(self._exchange(data)[0].numpy().tobytes(), type=kind)
        return agreed

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.num_values += x.numel()
        self._parts[self.rank] = x.clone()
        self._turn.release()
        try:
            self._barrier.wait()
            parts = [*self._parts]
            self._barrier.wait()  # nobody overwrites what another has yet to read
        finally:
            self._turn.acquire()
        return parts
