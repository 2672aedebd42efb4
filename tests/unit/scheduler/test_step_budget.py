"""How much of prompts steps compute: what a budget allows, and the steps that a core builds with it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drivers.core import CoreDriver
from tests.drivers.page_rank import PageRank, submit
from tests.drivers.small_core import SmallCore, built, got, wanted
from toka_async.arrays import as_i32
from toka_async.messages import AskStats, Ready, Step, StepDone
from toka_async.scheduler.step_budget import SHARE, StepBudget, StepLimits
from toka_async.scheduler.time_predictor import CONSTANT, KEY, StepWork, TimePredictor

TOKEN = 1e-4  # seconds
STEP = CONSTANT * TOKEN  # of a step in itself, as it is guessed
NOTHING = StepWork(0, 0)


def allowed(limits: StepLimits, decoding: StepWork, tokens: int = 10_000, is_streaming: bool = False) -> StepBudget:
    budget = StepBudget(TimePredictor(TOKEN), limits, tokens)
    budget.allow_prompts(decoding, is_streaming)
    return budget


def test_prompts_get_the_time_that_decoding_leaves() -> None:
    limits = StepLimits(seconds=STEP + 1000 * TOKEN, streaming=STEP + 400 * TOKEN)
    assert 960 < allowed(limits, NOTHING).take_chunk(0, 5000) < 1000  # attention takes the rest
    assert 560 < allowed(limits, StepWork(400, 0)).take_chunk(0, 5000) < 600
    assert 380 < allowed(limits, NOTHING, is_streaming=True).take_chunk(0, 5000) < 400
    assert allowed(limits, NOTHING).take_chunk(0, 30) == 30
    assert allowed(limits, NOTHING, tokens=7).take_chunk(0, 5000) == 7


def test_steps_beside_streams_are_some_times_as_long_as_without_prompts() -> None:
    """What a step takes by itself counts half."""
    limits = StepLimits(seconds=1.0, streaming=4 * STEP, decodings=6)
    assert 500 < allowed(limits, NOTHING, is_streaming=True).take_chunk(0, 5000) <= 2 * CONSTANT
    assert 640 < allowed(limits, StepWork(30, 0), is_streaming=True).take_chunk(0, 5000) <= 2 * CONSTANT + 5 * 30
    assert allowed(limits, NOTHING).take_chunk(0, 5000) > 4000
    decoding = StepWork(200, 0)
    assert 540 < allowed(limits, decoding, is_streaming=True).take_chunk(0, 5000) <= 3 * CONSTANT - 200


def test_a_chunk_after_many_tokens_is_smaller() -> None:
    limits = StepLimits(seconds=STEP + 1000 * TOKEN)
    sizes = [allowed(limits, NOTHING).take_chunk(start, 5000) for start in (0, 16_384, 65_536)]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.05)
    assert sizes[2] == pytest.approx(sizes[0] / 5, rel=0.05)


def test_prompts_get_a_share_however_long_decoding_takes() -> None:
    decoding = StepWork(20_000, 0)
    count = allowed(StepLimits(seconds=0.01), decoding).take_chunk(0, 10**6)
    assert count == pytest.approx(SHARE * 20_000, rel=0.15)  # attention takes the rest
    few = StepLimits(seconds=1e-6, least_tokens=200)
    assert allowed(few, NOTHING).take_chunk(0, 10**6) == pytest.approx(200, rel=0.05)


def test_tokens_beyond_the_limit_take_no_longer_than_what_each_step_costs() -> None:
    """On a slow device, 256 tokens alone take longer than the limit."""
    predictor = TimePredictor(TOKEN)
    predictor.constant = 5 * TOKEN
    budget = StepBudget(predictor, StepLimits(seconds=20 * TOKEN), 10_000)
    budget.allow_prompts(StepWork(1, 0), is_streaming=False)
    assert budget.take_chunk(0, 1900) == 13  # 14 tokens are left, of which pairs take a little
    over = StepBudget(predictor, StepLimits(seconds=TOKEN), 10_000)
    over.allow_prompts(NOTHING, is_streaming=False)
    assert over.take_chunk(0, 1900) == 4


def test_chunks_take_from_what_follows_and_none_begins_for_a_few_tokens() -> None:
    budget = allowed(StepLimits(seconds=STEP + 1000 * TOKEN), NOTHING)
    assert [budget.take_chunk(0, 400), budget.take_chunk(0, 400)] == [400, 400]
    budget.take_rows(180)
    assert not budget.has_room
    assert budget.take_chunk(0, 400) == 0
    assert budget.tokens == 10_000 - 980


@given(
    limit=st.floats(1e-6, 1.0),
    rows=st.integers(0, 5000),
    least=st.integers(1, 300),
    tokens=st.integers(1, 8000),
    prompts=st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 5000)), min_size=1, max_size=20),
)
def test_a_step_computes_something_and_no_more_than_there_is_room_for(
    limit: float, rows: int, least: int, tokens: int, prompts: list[tuple[int, int]]
) -> None:
    budget = allowed(StepLimits(limit, limit, least), StepWork(rows, 500 * rows), tokens)
    counts = []
    for start, wanted_count in prompts:
        had_room = budget.has_room
        counts.append(budget.take_chunk(start, wanted_count))
        assert (counts[-1] > 0) == had_room
        assert counts[-1] <= wanted_count
    assert counts[0] > 0
    assert sum(counts) <= tokens


class TimedRank:
    """A rank of pages whose steps take the time that was guessed: none has anything to learn."""

    def __init__(self, ready: Ready) -> None:
        self.pages = PageRank(ready)
        self.seconds: list[float] = []  # of steps with prompts
        self.chunks: list[dict[int, int]] = []  # of these: tokens by slot

    def run(self, step: Step) -> StepDone:
        done = self.pages.run(step)
        chunks = dict(zip(as_i32(step.chunk_slots).tolist(), as_i32(step.chunk_lengths).tolist(), strict=True))
        num_keys = sum(self.pages.rows[slot].position for slot in self.pages.order.tolist())
        predictor = TimePredictor(TOKEN)
        seconds = predictor.predict(StepWork(self.pages.order.size + sum(chunks.values()), num_keys))
        seconds += sum(predictor.pair * count * count / 2 for count in chunks.values())
        if chunks:
            self.seconds.append(seconds)
            self.chunks.append(chunks)
        return msgspec.structs.replace(done, seconds=seconds)


def make_driver(limits: StepLimits, max_tokens: int = 2000) -> tuple[CoreDriver, TimedRank]:
    ready = Ready(
        num_pages=1000,
        page_size=4,
        max_seqs=32,
        max_context=500,
        vocab_size=23,
        max_tokens=max_tokens,
        token_seconds=TOKEN,
    )
    rank = TimedRank(ready)
    driver = CoreDriver(ready, max_tokens=max_tokens, rank=rank, until_full=True, steps_ahead=2, step_limits=limits)
    return driver, rank


def make_prompt(number: int, length: int) -> list[int]:
    return [number, *[1] * (length - 1)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_burst_is_computed_in_order_in_steps_of_the_limit(stream: bool) -> None:
    limits = StepLimits(seconds=STEP + 300 * TOKEN, streaming=STEP + 100 * TOKEN, least_tokens=8)
    driver, rank = make_driver(limits)
    received = [driver.submit(submit(i, make_prompt(i, 70), max_tokens=3, stream=stream)) for i in range(10)]
    ended = []
    while driver.turn():
        ended += [i for i, each in enumerate(received) if each.ended and i not in ended]
    assert ended == list(range(10))
    limit = limits.streaming if stream else limits.seconds
    assert all(0.9 * limit < seconds <= limit for seconds in rank.seconds[:-1])
    assert sum(sum(chunks.values()) for chunks in rank.chunks) == 700
    for each in received:
        assert got(each) == wanted(each)


def test_work_without_streams_takes_small_steps_only_while_a_stream_is_read() -> None:
    limits = StepLimits(seconds=STEP + 300 * TOKEN, streaming=STEP + 100 * TOKEN, least_tokens=8)
    driver, rank = make_driver(limits)
    stream = driver.submit(submit(0, make_prompt(0, 20), max_tokens=6, stream=True))
    for i in range(1, 20):
        driver.submit(submit(i, make_prompt(i, 200), max_tokens=1))
    sizes = {True: set[int](), False: set[int]()}
    while driver.turn():
        if rank.chunks:
            sizes[not stream.ended].add(sum(rank.chunks.pop().values()))
    assert max(sizes[True]) <= 100
    assert max(sizes[False]) > 250


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_stream_alone_takes_large_steps(num_prompts: int) -> None:
    """Its tokens wait for nothing but its own prompt. Of two, the first one's would wait for the second."""
    limits = StepLimits(seconds=STEP + 300 * TOKEN, streaming=STEP + 100 * TOKEN, least_tokens=8)
    driver, rank = make_driver(limits)
    for i in range(num_prompts):
        driver.submit(submit(i, make_prompt(i, 450), max_tokens=1, stream=True))
    driver.turn()
    first = sum(rank.chunks[0].values())
    assert first > 250 if num_prompts == 1 else first <= 100
    driver.drain()


def test_prompts_move_on_though_decoding_takes_longer_than_the_limit() -> None:
    driver, rank = make_driver(StepLimits(seconds=1e-6, streaming=1e-6, least_tokens=8))
    received = [driver.submit(submit(i, make_prompt(i, 40), max_tokens=20, stream=True)) for i in range(20)]
    driver.drain()
    assert all(sum(chunks.values()) >= 8 for chunks in rank.chunks[:-1])
    for each in received:
        assert got(each) == wanted(each)


def test_groups_read_their_prefix_once() -> None:
    """Rows that share a long prompt leave the time that their own keys do not take."""
    sizes = []
    for group_min_seqs in (0, 2):
        core = SmallCore(
            num_pages=1000,
            max_seqs=32,
            max_tokens=2000,
            steps_ahead=1,
            step_limits=StepLimits(seconds=0.1, least_tokens=8),
            group_min_seqs=group_min_seqs,
            group_min_tokens=4,
        )
        core.submit(submit(0, make_prompt(0, 401), n=30, max_tokens=50))
        while core.pages.order.size < 30:
            core.turn()
        core.submit(submit(1, make_prompt(1, 2000), max_tokens=1))
        (size,) = as_i32(built(core).chunk_lengths).tolist()
        sizes.append(size)
    assert sizes[1] - sizes[0] == pytest.approx(29 * 400 * KEY, abs=2)


@pytest.mark.parametrize("stream", [False, True])
def test_more_urgent_work_takes_no_more_slots_than_its_prompts_can_use_in_a_step(stream: bool) -> None:
    limit, large = STEP + 100 * TOKEN, STEP + 1000 * TOKEN
    driver, rank = make_driver(StepLimits(large if stream else limit, limit, least_tokens=8))
    driver.submit(submit(0, make_prompt(0, 5), n=32, max_tokens=100, priority=1))
    while rank.pages.order.size < 32:
        driver.turn()
    for i in range(1, 20):
        driver.submit(submit(i, make_prompt(i, 90), max_tokens=50, priority=0, stream=stream))
    driver.turn()
    driver.core.receive(AskStats(number=1), 0.0)
    driver.collect()
    assert 0 < driver.stats.num_preemptions <= 3
