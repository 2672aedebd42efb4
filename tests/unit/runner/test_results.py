"""Launched steps: what travels to the host, and when it is read."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from toka_async.arrays import as_f32, as_i32
from toka_async.messages import StepDone
from toka_async.model.logprobs import Logprobs
from toka_async.runner.clock import StepClock
from toka_async.runner.prompt_logprobs import AskedChunk
from toka_async.runner.results import LaunchedStep, PartResults
from toka_async.runner.samples import Draws, TopLogprobs


@pytest.fixture
def clock() -> StepClock:
    return StepClock(torch.device("cpu"))


def launch(
    clock: StepClock,
    samples: Draws | None,
    asked: tuple[AskedChunk, ...] = (),
    of_chunks: Logprobs | None = None,
    step_id: int = 5,
) -> LaunchedStep:
    return LaunchedStep(step_id, [PartResults(samples, asked, of_chunks)], clock, clock.begin(), 3)


def test_a_step_of_events_alone(clock: StepClock) -> None:
    done = launch(clock, None).collect()
    assert done == StepDone(step_id=5, token_ids=done.token_ids, num_compiles=3, seconds=done.seconds)
    assert not done.token_ids
    assert done.seconds >= 0


def test_tokens(clock: StepClock) -> None:
    done = launch(clock, Draws(torch.tensor([7, 2**31 - 1, 0]))).collect()
    assert as_i32(done.token_ids).tolist() == [7, 2**31 - 1, 0]
    assert not any((done.logprobs, done.top_rows, done.top_ids, done.prompts))


def test_log_probs(clock: StepClock) -> None:
    done = launch(clock, Draws(torch.tensor([7, 8]), torch.tensor([-0.5, -0.25]))).collect()
    assert as_f32(done.logprobs).tolist() == [-0.5, -0.25]
    assert not any((done.top_rows, done.top_counts, done.top_ids, done.top_logprobs))


def test_likeliest_tokens_of_the_rows_that_ask_for_them(clock: StepClock) -> None:
    """Row 1 asks for none, row 4 for more than there are."""
    top = TopLogprobs(
        rows=np.array([0, 1, 3, 4]),
        counts=np.array([1, 0, 2, 9], dtype=np.int32),
        ids=torch.arange(12).view(4, 3),
        values=-torch.arange(12.0).view(4, 3),
    )
    done = launch(clock, Draws(torch.arange(5), torch.zeros(5), (top,))).collect()
    assert as_i32(done.top_rows).tolist() == [0, 3, 4]
    assert as_i32(done.top_counts).tolist() == [1, 2, 3]
    assert as_i32(done.top_ids).tolist() == [0, 6, 7, 9, 10, 11]
    assert as_f32(done.top_logprobs).tolist() == [0, -6, -7, -9, -10, -11]


@pytest.mark.parametrize("asking", [[0, 1, 2, 3], [1, 3]])
def test_likeliest_tokens_that_were_found_for_all_rows(clock: StepClock, asking: list[int]) -> None:
    counts = np.array([2, 1, 3, 2], dtype=np.int32)[asking]
    ids, values = torch.arange(12, dtype=torch.int32).view(4, 3), -torch.arange(12.0).view(4, 3)
    top = TopLogprobs(np.array(asking), counts, ids, values, of_all=True)
    done = launch(clock, Draws(torch.arange(4), torch.zeros(4), (top,))).collect()
    assert as_i32(done.top_rows).tolist() == asking
    expected = [3 * row + nth for row, count in zip(asking, counts.tolist(), strict=True) for nth in range(count)]
    assert as_i32(done.top_ids).tolist() == expected
    assert as_f32(done.top_logprobs).tolist() == [-each for each in expected]


def chunk(slot: int, num_top: int, num_ids: int) -> AskedChunk:
    return AskedChunk(slot, 10 * slot, num_top, 1.0, 0, np.zeros(num_ids, dtype=np.int32))


@pytest.mark.parametrize("samples", [None, Draws(torch.tensor([4])), Draws(torch.tensor([4]), torch.zeros(1))])
def test_log_probs_of_prompts(clock: StepClock, samples: Draws | None) -> None:
    ranks = torch.tensor([1, 2, 9], dtype=torch.int32)
    of_chunks = Logprobs(-torch.arange(3.0), torch.arange(6).view(3, 2), -torch.arange(6.0).view(3, 2), ranks)
    done = launch(clock, samples, (chunk(2, 1, 1), chunk(1, 5, 2)), of_chunks).collect()
    assert as_i32(done.token_ids).tolist() == ([] if samples is None else [4])
    first, second = done.prompts
    assert (first.slot, first.start, first.num_top, second.slot, second.start, second.num_top) == (2, 20, 1, 1, 10, 2)
    assert [as_f32(m.logprobs).tolist() for m in done.prompts] == [[0], [-1, -2]]
    assert [as_i32(m.top_ids).tolist() for m in done.prompts] == [[0], [2, 3, 4, 5]]
    assert [as_f32(m.top_logprobs).tolist() for m in done.prompts] == [[0], [-2, -3, -4, -5]]
    assert [as_i32(m.ranks).tolist() for m in done.prompts] == [[1], [2, 9]]


def test_steps_that_share_their_memory_are_collected_in_order(
    clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs write where they wrote before: a step has its own results from its launch on."""
    now = iter([0.0, 1.0, 1.5, 4.0, 4.0, 5.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    token_ids, logprobs = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    launched = []
    for index in range(3):
        token_ids.fill_(index)
        logprobs.fill_(-index)
        launched.append(launch(clock, Draws(token_ids, logprobs), step_id=index))
    done = [step.collect() for step in launched]
    assert [d.step_id for d in done] == [0, 1, 2]
    assert [as_i32(d.token_ids).tolist() for d in done] == [[i, i] for i in range(3)]
    assert [as_f32(d.logprobs).tolist() for d in done] == [[-i, -i] for i in range(3)]
    assert [(d.seconds, d.waited) for d in done] == [(1.0, 0.0), (2.5, 0.5), (1.0, 0.0)]


def test_parts_are_put_together_in_the_steps_order(clock: StepClock) -> None:
    """Decoding rows 0 to 3, then two chunks that sample; log-probs and likeliest tokens of one part only."""
    top = TopLogprobs(
        rows=np.array([0, 1]), counts=np.array([2, 1], dtype=np.int32), ids=torch.tensor([[8, 9], [6, 7]]),
        values=torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]),
    )  # fmt: skip
    plain = Draws(torch.tensor([10, 11, 14]))
    scored = Draws(torch.tensor([15, 12, 13]), torch.tensor([-5.0, -6, -7]), (top,))
    ranks = torch.ones(1, dtype=torch.int32)
    parts = [
        PartResults(plain, places=np.array([0, 1, 4])),
        PartResults(None, (chunk(2, 0, 1),), Logprobs(torch.zeros(1), torch.zeros(1, 0), torch.zeros(1, 0), ranks)),
        PartResults(scored, places=np.array([5, 2, 3])),
    ]
    done = LaunchedStep(5, parts, clock, clock.begin(), 3).collect()
    assert as_i32(done.token_ids).tolist() == [10, 11, 12, 13, 14, 15]
    assert as_f32(done.logprobs).tolist() == [0, 0, -6, -7, 0, -5]
    assert as_i32(done.top_rows).tolist() == [2, 5]
    assert as_i32(done.top_counts).tolist() == [1, 2]
    assert as_i32(done.top_ids).tolist() == [6, 8, 9]
    assert as_f32(done.top_logprobs).tolist() == [-3, -1, -2]
    assert [message.slot for message in done.prompts] == [2]
