"""The interface of admission policies, and the simplest policy. Knows counts of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from toka_async.arrays import Bool, Int32
from toka_async.messages import Forecast
from toka_async.scheduler.sequences.requests import PrefillTask, PromptRun, Request
from toka_async.scheduler.sequences.running import RunningSet


class Admission(Protocol):
    """Decides how much new work may start; order is the queue's. The caller checks free pages."""

    def forecast_times(self) -> Sequence[float]:
        """Microseconds that each of the newest forecasts took."""
        ...

    def expected_length(self) -> tuple[float, float] | None:
        """Mean and spread of new sequences' lengths, as shares of max_tokens; None: no prediction."""
        ...

    def forecast(self) -> Forecast | None:
        """Forecast the page use of what runs, for display; None: the policy makes no forecast."""
        ...

    def begin(self, num_preemptions: int) -> None:
        """Begin a new step; `num_preemptions` happened since the last one."""
        ...

    def prompt_fits(self, task: PrefillTask, num_new_pages: int) -> bool:
        """Whether a prompt that takes `num_new_pages` may start."""
        ...

    def add_prompt(self, task: PrefillTask, num_new_pages: int) -> None:
        """Reserve for a prompt that starts."""
        ...

    def count_fitting_samples(self, run: PromptRun) -> int:
        """Count the further samples of a computed prompt that may start."""
        ...

    def add_samples(self, run: PromptRun, count: int) -> None:
        """Reserve for samples that start."""
        ...

    def close_request(self, request: Request) -> None:
        """Forget a request whose samples have all ended."""
        ...

    def observe_ends(self, seqs: Int32, tokens: Int32, by_length: Bool) -> None:
        """Learn from sequences that ended by themselves after `tokens`; `by_length`: at max_tokens."""
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

    def prompt_fits(self, task: PrefillTask, num_new_pages: int) -> bool:
        del task, num_new_pages
        return True

    def add_prompt(self, task: PrefillTask, num_new_pages: int) -> None: ...

    def count_fitting_samples(self, run: PromptRun) -> int:
        del run
        return int(np.iinfo(np.int32).max)

    def add_samples(self, run: PromptRun, count: int) -> None: ...

    def close_request(self, request: Request) -> None: ...

    def observe_ends(self, seqs: Int32, tokens: Int32, by_length: Bool) -> None: ...
