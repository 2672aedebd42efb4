"""The Stats message: what it counts and when it comes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.page_rank import PageRank, submit
from toka_async.messages import Ready, Stats
from toka_async.scheduler.core import Core
from toka_async.scheduler.statistics import INTERVAL

READY = Ready(num_pages=64, page_size=4, max_seqs=4, max_context=256, vocab_size=23)


def stats_at(core: Core, now: float) -> list[Stats]:
    return [message for message in core.take_messages(now) if isinstance(message, Stats)]


def test_counts_while_work_goes_on_and_after_it() -> None:
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    core.submit(submit(0, [1, 2, 3, 4, 5], n=10, max_tokens=3))
    now = 10.0
    seen: list[Stats] = []
    while steps := core.next_steps(now):
        seen += stats_at(core, now)
        for step in steps:
            core.complete(rank.run(step), now)
        now += 1.0
    seen += stats_at(core, now)
    assert max(stats.num_running for stats in seen) == 4
    assert max(stats.num_waiting for stats in seen) >= 6
    assert max(stats.pages_used for stats in seen) >= 1 + 4
    last = seen[-1]
    assert (last.num_running, last.num_waiting, last.pages_used, last.num_pages) == (0, 0, 0, 64)
    assert (last.pages_cached, last.prompt_tokens, last.generated_tokens) == (1, 4, 30)
    assert last.num_steps == int(np.ceil(now - 10.0))


def test_a_few_a_second_while_work_goes_on() -> None:
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    core.submit(submit(0, [1, 2], max_tokens=200))
    times = []
    for i in range(100):
        now = i * INTERVAL / 10
        (step,) = core.next_steps(now)
        times += [now] * len(stats_at(core, now))
        core.complete(rank.run(step), now)
    assert 9 <= len(times) <= 11


def test_idle_and_unchanged_is_silence() -> None:
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    core.submit(submit(0, [1, 2], max_tokens=1))
    (step,) = core.next_steps(0.0)
    core.take_messages(0.0)
    core.complete(rank.run(step), 0.0)
    assert len(stats_at(core, 0.0)) == 1  # at once: it fell idle
    assert stats_at(core, 1000.0) == []


def test_how_long_requests_wait_to_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows, eight requests of three steps: half of them wait for the others."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    for key in range(8):
        core.submit(submit(key, [1, 2, key], max_tokens=3))
    while steps := core.next_steps(now):
        for step in steps:
            core.complete(rank.run(step), now)
        now += 1.0
    last = stats_at(core, now)[-1]
    assert last.num_started == 8
    assert last.queue_seconds == 4 * 3.0
