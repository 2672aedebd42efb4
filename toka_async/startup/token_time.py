"""Measures how long a large step of prompts takes: the scheduler's first guess of what a step costs."""

from __future__ import annotations

from toka_async.runner.runner import Runner
from toka_async.startup.synthetic import SyntheticRows

NUM_TOKENS = 8192  # enough that the device is busy, and that launching takes less time than computing
PROMPT = 512  # tokens of each prompt
RUNS = 2  # the first may compile kernels


def measure_token_seconds(runner: Runner) -> float:
    """Measures the seconds of a prompt's token in a step of many. Leaves the runner without rows."""
    ready, seconds = runner.ready, float("inf")
    length = min(PROMPT, ready.max_context, ready.max_tokens)
    count = min(NUM_TOKENS // length, ready.max_tokens // length, ready.max_seqs)
    for _ in range(RUNS):
        rows = SyntheticRows(ready, reuse=True)
        seconds = min(seconds, runner.run(rows.make_step([length] * count)).seconds)
        runner.run(rows.end())
    return seconds / (length * count)
