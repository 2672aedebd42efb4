from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.drivers.page_rank import PageRank, submit
from toka_async.arrays import as_i64, i32_column
from toka_async.messages import GAP_SECONDS, STEP_COSTS, AskStats, ExpertLoads, Ready, Stats
from toka_async.scheduler.admission.policy import UntilFull
from toka_async.scheduler.core import Core
from toka_async.scheduler.statistics import INTERVAL

READY = Ready(num_pages=64, page_size=4, max_seqs=4, max_context=256, vocab_size=23)


def stats_at(core: Core, now: float) -> list[Stats]:
    stats = core.take_stats(now)
    return [] if stats is None else [stats]


def watch(core: Core, rank: PageRank, now: float) -> tuple[list[Stats], float]:
    """All statistics to the end, with a second for each step; when that is."""
    seen: list[Stats] = []
    while steps := list(core.next_steps(now)):
        seen += stats_at(core, now)
        for step in steps:
            core.complete(rank.run(step), now)
        now += 1.0
    return seen + stats_at(core, now), now


def test_counts_while_work_goes_on_and_after_it() -> None:
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    core.submit(submit(0, [1, 2, 3, 4, 5], n=10, max_tokens=3), 0.0)
    seen, now = watch(core, rank, 10.0)
    assert max(stats.num_running for stats in seen) == 4
    assert max(stats.num_waiting for stats in seen) >= 6
    assert max(stats.pages_used for stats in seen) >= 1 + 4
    last = seen[-1]
    assert (last.num_running, last.num_waiting, last.pages_used, last.num_pages) == (0, 0, 0, 64)
    assert (last.pages_cached, last.prompt_tokens, last.generated_tokens) == (1, 4, 30)
    assert last.num_steps == int(np.ceil(now - 10.0))


def test_a_few_a_second_while_work_goes_on() -> None:
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    core.submit(submit(0, [1, 2], max_tokens=200), 0.0)
    times = []
    for i in range(100):
        now = i * INTERVAL / 10
        (step,) = core.next_steps(now)
        times += [now] * len(stats_at(core, now))
        core.complete(rank.run(step), now)
    assert 9 <= len(times) <= 11


def test_loads_of_experts_add_up_by_layer() -> None:
    core = Core(READY, max_tokens=32, steps_ahead=1)
    core.note_expert_loads(ExpertLoads((2,), (i32_column([1, 2**31 - 1]),)))
    core.note_expert_loads(ExpertLoads((0,), (i32_column([3, 4]),)))
    core.note_expert_loads(ExpertLoads((2,), (i32_column([1, 1]),)))
    (stats,) = stats_at(core, 0.0)
    assert [as_i64(loads).tolist() for loads in stats.expert_loads] == [[3, 4], [], [2, 2**31]]


def test_idle_and_unchanged_is_silence() -> None:
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    core.submit(submit(0, [1, 2], max_tokens=1), 0.0)
    (step,) = core.next_steps(0.0)
    core.take_stats(0.0)
    core.complete(rank.run(step), 0.0)
    assert len(stats_at(core, 0.0)) == 1  # at once: it fell idle
    assert stats_at(core, 1000.0) == []


def test_a_forecast_for_who_looks() -> None:
    """Once all run, it is what comes: never less, and mostly the same. Ends are forecast a step late."""
    ready = msgspec.structs.replace(READY, max_seqs=8)
    core, rank = Core(ready, max_tokens=32, steps_ahead=1), PageRank(ready)
    for key, max_tokens in enumerate((5, 17, 9, 30)):
        core.submit(submit(key, [1, 2, key], n=2, max_tokens=max_tokens), 0.0)
    seen: list[Stats] = []
    while steps := list(core.next_steps(0.0)):
        core.receive(AskStats(number=len(seen) + 1, forecast=True), 0.0)
        seen += stats_at(core, 0.0)  # however soon after the last
        for step in steps:
            core.complete(rank.run(step), 0.0)
    start = next(i for i, stats in enumerate(seen) if stats.num_running == 8) + 1  # none is about to start
    forecast = seen[start].forecast
    assert forecast is not None
    came = [stats.pages_used for stats in seen[start + 1 :]] + [0]
    assert (forecast.steps, len(forecast.pages)) == (len(came) - 1, len(came))
    assert all(expected >= used for expected, used in zip(forecast.pages, came, strict=True))
    assert sum(expected == used for expected, used in zip(forecast.pages, came, strict=True)) > 0.75 * len(came)
    assert max(forecast.pages) < forecast.limit <= ready.num_pages


def test_steps_with_prompts_are_counted_and_timed() -> None:
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    core.submit(submit(0, [1, 2, 3], max_tokens=5), 0.0)
    now = 0.0
    while steps := list(core.next_steps(now)):
        now += 1.0
        seconds = 0.5 if steps[0].chunk_slots else 0.25
        core.complete(msgspec.structs.replace(rank.run(steps[0]), seconds=seconds), now)
    (last,) = stats_at(core, now)
    assert (last.num_prompt_steps, last.prompt_step_seconds) == (1, 0.5)
    assert (last.num_steps, last.step_seconds) == (5, 1.5)
    assert len(last.step_costs) == len(STEP_COSTS)
    assert all(cost > 0 for cost in last.step_costs)


def test_one_look_is_answered_once() -> None:
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    core.submit(submit(0, [1, 2], max_tokens=3), 0.0)
    core.receive(AskStats(number=1, forecast=True), 0.0)
    seen, _ = watch(core, rank, 0.0)
    assert len(seen) >= 3
    assert [stats.forecast is not None for stats in seen] == [True, *([False] * (len(seen) - 1))]


def test_how_long_requests_wait_to_be_started() -> None:
    """Four rows, eight requests of three steps: half of them wait for the others."""
    now = 100.0
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    for key in range(8):
        core.submit(submit(key, [1, 2, key], max_tokens=3), now)
    last = watch(core, rank, now)[0][-1]
    assert last.num_started == 8
    assert last.queue_seconds == 4 * 3.0


def run_to_the_end(core: Core, rank: PageRank, seconds: float = 1.0) -> Stats:
    """Steps so far apart; the last statistics."""
    now = 100.0
    while steps := list(core.next_steps(now)):
        for step in steps:
            now += seconds
            core.complete(rank.run(step), now)
    return stats_at(core, now)[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("num_requests", "n"), [(5, 1), (1, 4), (2, 3)])
def test_every_token_but_a_samples_first_has_a_gap(stream: bool, num_requests: int, n: int) -> None:
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    for key in range(num_requests):
        core.submit(submit(key, [1, 2, 3, key], n=n, max_tokens=6, stream=stream), 0.0)
    last = run_to_the_end(core, rank, 0.5)
    num_gaps = num_requests * n * 5
    assert last.token_gaps[GAP_SECONDS.index(0.5)] == sum(last.token_gaps) == num_gaps
    assert last.token_gap_seconds == num_gaps * 0.5


def test_a_preemption_is_one_long_gap() -> None:
    ready = Ready(num_pages=12, page_size=4, max_seqs=4, max_context=64, vocab_size=23)
    core, rank = Core(ready, max_tokens=32, steps_ahead=1, admission=UntilFull), PageRank(ready)
    for key in range(4):
        core.submit(submit(key, [1, 2, 3, key], max_tokens=16), 0.0)
    last = run_to_the_end(core, rank)
    assert last.num_preemptions > 0
    assert sum(last.token_gaps) == 4 * 15
    assert sum(last.token_gaps[GAP_SECONDS.index(1) + 1 :]) == last.num_preemptions


def test_whoever_asks_is_answered_at_once() -> None:
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    core.submit(submit(0, [1, 2], max_tokens=200), 0.0)
    for now in (0.0, INTERVAL / 10):
        for step in list(core.next_steps(now)):
            core.complete(rank.run(step), now)
        core.take_stats(now)
    assert stats_at(core, INTERVAL / 5) == []
    for number in (1, 2):
        core.receive(AskStats(number=number), 0.0)
        (stats,) = stats_at(core, INTERVAL / 5)
        assert (stats.answers, stats.num_running) == (number, 1)
    assert stats_at(core, INTERVAL / 5) == []


@pytest.mark.parametrize("steps_ahead", [1, 3])
def test_all_samples_run_or_wait(steps_ahead: int) -> None:
    """To the last token, though the last steps are queued and nothing more is."""
    core, rank = Core(READY, max_tokens=32, steps_ahead=steps_ahead), PageRank(READY)
    core.submit(submit(0, [1, 2, 3, 4, 5], n=10, max_tokens=7), 0.0)
    seen: list[tuple[int, int]] = []
    queued = list(core.next_steps(0.0))
    while queued:
        core.receive(AskStats(number=len(seen) + 1), 0.0)
        (stats,) = stats_at(core, 0.0)
        seen.append((stats.num_running, stats.num_waiting))
        core.complete(rank.run(queued.pop(0)), 0.0)
        queued += core.next_steps(0.0)
    if steps_ahead == 1:
        assert seen.pop(0) == (1, 9)  # the prompt is computed for all
    assert {running for running, _ in seen} == {4, 2}
    assert [waiting for _, waiting in seen] == sorted((waiting for _, waiting in seen), reverse=True)
    assert {waiting for _, waiting in seen} >= {6, 2, 0}
    assert seen[-1] == (2, 0)


def test_a_prompt_counts_for_each_of_its_samples() -> None:
    core, rank = Core(READY, max_tokens=32, steps_ahead=1), PageRank(READY)
    prompt = list(range(1, 10))
    core.submit(submit(0, prompt, n=10, max_tokens=1), 0.0)
    last = run_to_the_end(core, rank)
    assert (last.prefix_queries, last.prefix_hits, last.prefix_shared) == (10 * 9, 9 * 8, 9 * 8)
    assert last.prompt_tokens == 8  # each sample begins with the prompt's last token
    core.submit(submit(1, prompt, n=1, max_tokens=1), 0.0)
    last = run_to_the_end(core, rank)
    assert (last.prefix_queries, last.prefix_hits, last.prefix_shared) == (11 * 9, 9 * 8 + 8, 9 * 8)
    assert last.prompt_tokens == 8 + 1
