"""Takes how many tokens chose each expert, which the device counts, now and then and without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from toka_async.model.decoder import RankModel
from toka_async.model.experts_feed import ExpertsFeed

INTERVAL = 1.0  # seconds between two readings while steps come


@dataclass(slots=True, frozen=True)
class LoadReading:
    """layers: their numbers. counts: int32 [experts] of each, on the device."""

    layers: tuple[int, ...]
    counts: list[Tensor]


class LoadCounter:
    """The counts of one rank's layers. Tells them which tokens of a step are padding, which does not count."""

    def __init__(
        self, feeds: Mapping[int, ExpertsFeed], device: torch.device, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """feeds: by the layer's number in the model."""
        self._layers = tuple(feeds)
        self._loads: list[Tensor] = [feed.loads for feed in feeds.values()]
        self._clock = clock
        self._read_at = float("-inf")
        self._num_tokens = 0
        self._counted = torch.zeros(1, dtype=torch.int32, device=device)
        for feed in feeds.values():
            feed.counted = self._counted

    def reset(self) -> None:
        """Forgets what was counted."""
        torch._foreach_zero_(self._loads)

    def begin(self, num_tokens: int) -> None:
        """Notes the tokens of the next step, which come before its padding."""
        if num_tokens != self._num_tokens:
            self._num_tokens = num_tokens
            self._counted.fill_(num_tokens)

    def take_due(self) -> LoadReading | None:
        """Takes what was counted since the last time, if that is long ago."""
        return self.take() if self._clock() - self._read_at >= INTERVAL else None

    def take(self) -> LoadReading:
        """Takes what was counted since the last time."""
        self._read_at = self._clock()
        reading = LoadReading(self._layers, [loads.to(torch.int32) for loads in self._loads])
        self.reset()
        return reading


def make_load_counter(decoder: RankModel, device: torch.device) -> LoadCounter | None:
    """Returns None for a stage without experts."""
    layers = enumerate(decoder.list_layers(), decoder.part.first)
    feeds = {number: layer.feed for number, layer in layers if isinstance(layer.feed, ExpertsFeed)}
    return LoadCounter(feeds, device) if feeds else None
