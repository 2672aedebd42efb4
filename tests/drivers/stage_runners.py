"""A pipeline in one process: its stages' runners compute every step one after the other, over links in memory.

A stage that would wait for something that nobody has sent fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from toka_async.messages import Step, StepDone
from toka_async.runner.links import Receiver, Sender, StageLinks
from toka_async.runner.pipeline import StageSetup
from toka_async.runner.results import LaunchedStep
from toka_async.runner.runner import Runner


class MemoryLink:
    """Both ends of a link. num_taken: tensors that were received."""

    def __init__(self, capacity: int = 100) -> None:
        self.num_taken = 0
        self._capacity = capacity
        self._sent: deque[Tensor] = deque()
        self._posted: deque[int] = deque()
        self._num_held = 0

    def send(self, x: Tensor) -> None:
        assert len(x)
        self._sent.append(x.clone())

    def post(self, count: int) -> None:
        assert not self.is_full
        assert count >= 1
        self._posted.append(count)

    def take(self) -> Tensor:
        count = self._posted.popleft()
        assert self._sent, "it would wait for ever"
        x = self._sent.popleft()
        assert len(x) == count
        self.num_taken += 1
        self._num_held += 1
        return x

    def release(self) -> None:
        assert self._num_held > 0
        self._num_held -= 1

    def discard(self) -> None:
        while self._posted:
            self.take()
            self.release()

    @property
    def is_full(self) -> bool:
        return len(self._posted) + self._num_held >= self._capacity

    @property
    def num_posted(self) -> int:
        return len(self._posted)


def links_in_memory(num_stages: int, capacity: int = 100) -> list[StageLinks]:
    """Of the stages of one pipeline. capacity: sampled tokens that may be under way."""
    forward = [MemoryLink() for _ in range(num_stages - 1)]
    back = MemoryLink(capacity)
    receivers = [None, *(cast(Receiver, link) for link in forward)]
    senders = [*(cast(Sender, link) for link in forward), None]
    return [
        StageLinks(
            before=receivers[stage],
            after=senders[stage],
            tokens_from_last=cast(Receiver, back) if stage == 0 else None,
            tokens_to_first=cast(Sender, back) if stage == num_stages - 1 else None,
        )
        for stage in range(num_stages)
    ]


def setups(
    num_stages: int, num_parts: int, size: int, dtype: torch.dtype, least_tokens: int = 3, capacity: int = 100
) -> list[StageSetup]:
    """Of the stages of one pipeline; chunks are cut into few tokens."""
    return [
        StageSetup(links, num_parts, size, dtype, torch.device("cpu"), least_tokens)
        for links in links_in_memory(num_stages, capacity)
    ]


class StageRunners:
    """The stages as one rank; the last one answers."""

    def __init__(self, stages: Sequence[Runner]) -> None:
        self.stages = stages
        self.ready = stages[-1].ready

    def run(self, step: Step) -> StepDone:
        return self.launch(step).collect()

    def launch(self, step: Step) -> LaunchedStep:
        launched = [stage.launch(step) for stage in self.stages]
        for stage in launched[:-1]:
            done = stage.collect()
            assert done.step_id == step.step_id
            assert not done.token_ids
        return launched[-1]


def stage_runners(make: Callable[[StageSetup, int], Runner], setups: Sequence[StageSetup]) -> StageRunners:
    """make: the runner of a setup and a stage."""
    return StageRunners([make(setup, stage) for stage, setup in enumerate(setups)])
