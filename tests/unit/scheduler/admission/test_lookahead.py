from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drivers.core import CoreDriver
from tests.drivers.page_rank import submit
from toka_async.arrays import Float64, Int32, i32_column
from toka_async.messages import Ready, TokenSampling
from toka_async.scheduler.admission.lookahead import LARGEST_MARGIN, LookAhead
from toka_async.scheduler.core import Core
from toka_async.scheduler.sequences.running import RunningSet

PAGE = 4
CAN_STOP = TokenSampling(end_ids=i32_column([9999]))  # beyond the vocabulary: it may end early, and never does


class Recording(LookAhead):
    """Keeps the forecast of every build, and the pages in use: rows have theirs, nothing has started yet."""

    def __init__(self, running: RunningSet) -> None:
        super().__init__(running)
        self.forecasts: list[Float64] = []
        self.used: list[int] = []

    def begin(self, num_preemptions: int) -> None:
        super().begin(num_preemptions)
        self.forecasts.append(self.usage())
        self.used.append(self.running.cache.num_used)


class Watched(CoreDriver):
    """A driver whose policy and running set can be looked at; one step at a time."""

    def __init__(self, num_pages: int, max_seqs: int = 16) -> None:
        ready = Ready(num_pages=num_pages, page_size=PAGE, max_seqs=max_seqs, max_context=4096, vocab_size=23)
        super().__init__(ready, max_tokens=1024, steps_ahead=1)
        self.core = Core(ready, max_tokens=1024, steps_ahead=1, admission=self._make)

    def _make(self, running: RunningSet) -> Recording:
        self.running, self.policy = running, Recording(running)
        return self.policy

    @property
    def num_running(self) -> int:
        return int(self.running.rows.size)


def filled(value: int, size: int) -> Int32:
    return np.full(size, value, np.int32)


@settings(max_examples=40, deadline=None)
@given(
    work=st.lists(
        st.tuples(st.integers(1, 30), st.sampled_from([1, 1, 2, 5]), st.integers(1, 40)), min_size=1, max_size=5
    )
)
def test_the_forecast_is_what_happens_when_lengths_are_known(work: list[tuple[int, int, int]]) -> None:
    """Without end tokens a sequence ends at max_tokens. Once nothing more starts, every forecast is exact."""
    driver, last_start = Watched(num_pages=2000, max_seqs=64), 0
    forecasts, used = driver.policy.forecasts, driver.policy.used
    for i, (prompt, n, max_tokens) in enumerate(work):
        driver.submit(submit(i, list(range(i, i + prompt)), n=n, max_tokens=max_tokens))
    while True:
        driver.build()
        if not driver.queued:
            break
        if driver.queued[0].admit_slots or driver.queued[0].chunk_slots:
            last_start = len(used)
        driver.complete()
    for i in range(last_start, len(used)):
        length = min(len(used) - i, forecasts[i].size)
        assert forecasts[i][:length].tolist() == used[i : i + length]
        assert not any(used[i + length :])
        assert not forecasts[i][length:].any()
    assert driver.stats.num_preemptions == 0


def test_what_fits_by_the_forecast_starts_and_what_does_not_waits() -> None:
    """Two sequences of 24 tokens need 12 pages in the end; a third one never fits beside them."""
    driver = Watched(num_pages=13)
    for i in range(3):
        driver.submit(submit(i, [i, 1, 2, 3], max_tokens=20))
    driver.turn()
    driver.turn()
    assert driver.num_running == 2
    assert driver.running.cache.num_reclaimable >= 6, "there is room now, not later"
    driver.drain()
    assert driver.stats.num_preemptions == 0


def test_one_starts_early_when_another_will_have_ended_by_then() -> None:
    """Reserving for both would take 6 + 6 pages; the short one's are free when the long one needs them."""
    driver = Watched(num_pages=10)
    driver.submit(submit(0, [0, 1, 2, 3], max_tokens=20))
    for _ in range(12):
        driver.turn()
    driver.submit(submit(1, [1, 1, 2, 3], max_tokens=20))
    driver.turn()
    driver.turn()
    assert driver.num_running == 2
    driver.drain()
    assert driver.stats.num_preemptions == 0


def test_shared_pages_count_once() -> None:
    """8 samples of a prompt of 40 tokens: 10 pages together and 2 each, not 12 each."""
    driver = Watched(num_pages=30)
    driver.submit(submit(0, list(range(41)), n=8, max_tokens=7))
    driver.turn()
    driver.turn()
    assert driver.num_running == 8
    assert driver.policy.usage().max() <= 10 + 8 * 2
    driver.drain()
    assert driver.stats.num_preemptions == 0


def test_a_waiting_prompt_is_held_beyond_every_running_sequence() -> None:
    """Its samples have not all started: the horizon of those that run says nothing about its pages."""
    driver = Watched(num_pages=60, max_seqs=4)
    driver.submit(submit(0, list(range(41)), n=8, max_tokens=7))
    driver.turn()
    driver.turn()
    assert driver.num_running == 4
    assert driver.policy._forecast()[0].curve.rest >= 10


def test_the_margin_grows_with_preemptions_and_fades() -> None:
    driver = Watched(num_pages=1000)
    driver.submit(submit(0, [1, 2, 3], n=8, max_tokens=50, sampling=CAN_STOP))
    driver.turn()
    driver.turn()
    policy = LookAhead(driver.running)
    policy.begin(0)
    calm = policy.margin
    policy.begin(1)
    once = policy.margin
    policy.begin(2)
    assert calm < once < policy.margin
    for _ in range(5000):
        policy.begin(0)
    assert policy.margin == pytest.approx(calm, rel=1e-3)
    policy.begin(10_000)
    assert policy.margin <= LARGEST_MARGIN


def test_the_margin_is_smaller_for_many_sequences_and_none_where_lengths_are_known() -> None:
    margins = []
    for n, sampling in ((4, CAN_STOP), (64, CAN_STOP), (64, TokenSampling())):
        driver = Watched(num_pages=4000, max_seqs=64)
        driver.submit(submit(0, [1, 2, 3], n=n, max_tokens=50, sampling=sampling))
        driver.turn()
        driver.turn()
        assert driver.num_running == n
        driver.policy.begin(0)
        margins.append(driver.policy.margin)
    assert margins[0] > margins[1] > margins[2] == 0


def test_lengths_seen_let_more_start() -> None:
    """Room for samples of a prompt grows when sequences before it turned out short."""
    room = []
    for seen in (1000, 10):
        driver = Watched(num_pages=2000, max_seqs=1000)
        policy = driver.policy
        policy.predictor.observe(filled(0, 500), filled(seen, 500), filled(1000, 500), filled(seen, 500) == 1000)
        driver.submit(submit(0, list(range(9)), n=900, max_tokens=1000, sampling=CAN_STOP))
        driver.turn()
        driver.turn()
        room.append(driver.num_running)
    assert room[1] > 5 * room[0] > 0


def test_samples_of_one_prompt_are_a_group_and_give_it_back() -> None:
    driver = Watched(num_pages=2000, max_seqs=64)
    driver.submit(submit(0, [1, 2, 3], n=16, max_tokens=5, sampling=CAN_STOP))
    driver.submit(submit(1, [2, 2, 3], n=15, max_tokens=5, sampling=CAN_STOP))
    driver.turn()
    driver.turn()
    groups = driver.running.table.group[driver.running.rows]
    assert sorted(np.unique(groups, return_counts=True)[1].tolist()) == [15, 16]
    driver.drain()
    assert driver.policy.predictor.open_group() == groups.max()
