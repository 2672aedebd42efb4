"""What an admission policy decides, and the two simplest ones. Knows counts of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from toka_async.arrays import Bool, Int32
from toka_async.messages import Forecast
from toka_async.scheduler.sequences.requests import PrefillTask, PromptRun, Request
from toka_async.scheduler.sequences.running import RunningSet


class Admission(Protocol):
    """Decides how much new work may start; order is the queue's. Free pages are checked by the caller."""

    def forecast_times(self) -> Sequence[float]:
        """Microseconds that each of the newest forecasts took."""
        ...

    def expected_length(self) -> tuple[float, float] | None:
        """Mean and spread of new sequences' lengths, as shares of max_tokens; None: it does not guess."""
        ...

    def forecast(self) -> Forecast | None:
        """Of what runs, to be shown; None: it makes none."""
        ...

    def begin(self, num_preemptions: int) -> None:
        """A new step is built; so many preemptions happened since the last."""
        ...

    def prompt_fits(self, job: PrefillTask, num_new_pages: int) -> bool:
        """May this prompt start, which takes so many pages now?"""
        ...

    def add_prompt(self, job: PrefillTask, num_new_pages: int) -> None:
        """It starts."""
        ...

    def samples_that_fit(self, run: PromptRun) -> int:
        """How many more samples of this computed prompt may start?"""
        ...

    def add_samples(self, run: PromptRun, count: int) -> None:
        """So many of them start."""
        ...

    def closed(self, request: Request) -> None:
        """All of its samples have ended."""
        ...

    def ended(self, lanes: Int32, tokens: Int32, by_length: Bool) -> None:
        """Sequences ended by themselves with so many tokens; `by_length`: at max_tokens."""
        ...


class UntilFull:
    """Admits while pages are free: the cache is always full, and sequences are preempted to let others grow."""

    def __init__(self, running: RunningSet) -> None:
        del running

    def forecast_times(self) -> Sequence[float]:
        return ()

    def expected_length(self) -> tuple[float, float] | None:
        return None

    def forecast(self) -> Forecast | None:
        return None

    def begin(self, num_preemptions: int) -> None: ...

    def prompt_fits(self, job: PrefillTask, num_new_pages: int) -> bool:
        del job, num_new_pages
        return True

    def add_prompt(self, job: PrefillTask, num_new_pages: int) -> None: ...

    def samples_that_fit(self, run: PromptRun) -> int:
        del run
        return int(np.iinfo(np.int32).max)

    def add_samples(self, run: PromptRun, count: int) -> None: ...

    def closed(self, request: Request) -> None: ...

    def ended(self, lanes: Int32, tokens: Int32, by_length: Bool) -> None: ...
