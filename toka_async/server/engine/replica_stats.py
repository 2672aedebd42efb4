"""Several replicas' statistics as one. Knows the fields of Stats and what each measures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import msgspec

from toka_async.messages import Stats

_STATE = ("num_running", "num_waiting", "pages_used", "pages_cached", "num_pages")
_COUNTERS = (
    "prefix_queries",
    "prefix_hits",
    "num_preemptions",
    "prompt_tokens",
    "generated_tokens",
    "wasted_tokens",
    "recomputed_tokens",
    "num_steps",
    "step_seconds",
    "idle_seconds",
    "device_idle_seconds",
    "num_compiles",
    "num_started",
    "queue_seconds",
    "prefix_shared",
    "token_gap_seconds",
)
NO_TIMES = (0.0, 0.0, 0.0)


def merged(parts: Sequence[Stats]) -> Stats:
    """Sums; of percentiles the worst replica's, of expected lengths the mean. Forecasts stay with their replicas."""
    if len(parts) == 1:
        return parts[0]
    sums = {name: sum(getattr(part, name) for part in parts) for name in (*_STATE, *_COUNTERS)}
    lengths = [part.expected_length for part in parts if part.expected_length is not None]
    mean, spread = (sum(values) / max(1, len(lengths)) for values in ((a for a, _ in lengths), (b for _, b in lengths)))
    return Stats(
        **sums,
        depths=tuple(int(sum(column)) for column in _columns(part.depths for part in parts)),
        pipeline=tuple(_sums(stages) for stages in zip_longest(*(part.pipeline for part in parts), fillvalue=NO_TIMES)),
        stage_seconds=tuple(sum(column) for column in _columns(part.stage_seconds for part in parts)),
        token_gaps=tuple(int(sum(column)) for column in _columns(part.token_gaps for part in parts)),
        scheduler_us=tuple(max(column) for column in _columns(part.scheduler_us for part in parts)),
        forecast_us=tuple(max(column) for column in _columns(part.forecast_us for part in parts)),
        expected_length=(mean, spread) if lengths else None,
    )


def counters(stats: Stats) -> Stats:
    """What stays of a scheduler that is gone: its counters, so that sums never fall."""
    state = dict.fromkeys(_STATE, 0)
    return msgspec.structs.replace(stats, **state, scheduler_us=(), forecast_us=(), expected_length=None, forecast=None)


def _sums(stages: Iterable[tuple[float, float, float]]) -> tuple[float, float, float]:
    """One stage's times of all replicas."""
    seconds, stalled, waited = (sum(column) for column in zip(*stages, strict=True))
    return seconds, stalled, waited


def _columns(rows: Iterable[Sequence[float]]) -> Iterable[tuple[float, ...]]:
    return zip_longest(*rows, fillvalue=0)
