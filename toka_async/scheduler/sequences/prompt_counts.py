"""Counts of prompts: tokens that samples need, tokens found or shared, and time in the queue. Knows prompt runs."""

from __future__ import annotations

from dataclasses import dataclass

from toka_async.scheduler.sequences.requests import PromptRun


@dataclass(slots=True)
class PromptCounts:
    """Counts since the start; see `messages.Stats`."""

    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_shared: int = 0
    num_started: int = 0
    queue_seconds: float = 0.0

    def count_opened(self, run: PromptRun, now: float) -> None:
        """Count a request once: after a preemption it finds its own pages."""
        if run.request.num_found >= 0:
            return
        run.request.num_found = run.num_found
        num_samples = run.request.submit.n if run.forks else 1
        shared = (num_samples - 1) * run.num_to_compute  # computed once, for the first sample
        self.prefix_queries += num_samples * run.task.token_ids.size
        self.prefix_shared += shared
        self.prefix_hits += shared + run.num_found
        self.num_started += 1
        self.queue_seconds += now - run.request.since

    def count_computed(self, run: PromptRun, num_tokens: int) -> None:
        self.prompt_tokens += num_tokens
        self.recomputed_tokens += num_tokens if run.task.was_preempted else 0
