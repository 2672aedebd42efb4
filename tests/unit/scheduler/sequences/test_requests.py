from __future__ import annotations

import numpy as np
import pytest

from tests.drivers.page_rank import submit
from toka_async.scheduler.sequences.requests import PrefillTask, PromptRun, Request, sample_seeds


def request(**fields: object) -> Request:
    message = submit(1, [1, 2, 3], **fields)
    return Request(message, np.asarray([1, 2, 3], np.int32), arrival=5, num_open=message.n)


def run(task: PrefillTask, computed: int = 0) -> PromptRun:
    pages = np.asarray([8, 9], np.int32)
    return PromptRun(0, task, num_to_compute=2, num_found=0, num_computed=computed, nodes=[], pages=pages)


def test_seeds_differ_by_sample_and_by_seed() -> None:
    samples = np.arange(1000, dtype=np.int32)
    seeds = np.concatenate([sample_seeds(seed, samples) for seed in (0, 1, 2**63, 2**64 - 1)])
    assert seeds.dtype == np.int64
    assert np.unique(seeds).size == seeds.size


def test_seeds_are_splitmix64() -> None:
    """The published first outputs of the generator seeded with 0 (Steele et al. 2014, as in Java's test vectors)."""
    outputs = sample_seeds(0, np.arange(3, dtype=np.int32)).view(np.uint64)
    assert [f"{int(x):016x}" for x in outputs] == ["e220a8397b1dcdaf", "6e789e6aa1b965f4", "06c45d188009454f"]


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 + 7])
def test_any_integer_is_a_seed(seed: int) -> None:
    one = np.zeros(1, np.int32)
    assert sample_seeds(seed, one).tolist() == sample_seeds(seed % 2**64, one).tolist()


def test_seeds_of_many_requests_equal_seeds_of_each() -> None:
    seeds, samples = np.asarray([3, 3, 2**64 - 1], np.uint64), np.asarray([0, 4, 2], np.int32)
    each = [sample_seeds(int(s), samples[i : i + 1])[0] for i, s in enumerate(seeds)]
    assert sample_seeds(seeds, samples).tolist() == each


def test_order_of_a_shared_prompt_is_that_of_its_next_sample() -> None:
    many = request(n=4, priority=-2)
    task = PrefillTask(many, -1, many.prompt)
    assert task.order == (-2, 5, 0)
    many.next_sample = 3
    assert task.order == (-2, 5, 3)
    assert PrefillTask(many, 1, many.prompt).order == (-2, 5, 1)


def test_pending_samples_are_of_shared_prompts_only() -> None:
    many, prompt_only = request(n=4), request(n=4, max_tokens=0)
    assert run(PrefillTask(many, -1, many.prompt)).num_pending == 4
    assert run(PrefillTask(many, 2, many.prompt)).num_pending == 0  # a preempted sample by itself
    assert run(PrefillTask(prompt_only, -1, prompt_only.prompt)).num_pending == 0


def test_own_pages_are_those_not_in_the_tree_and_the_tail() -> None:
    task = PrefillTask(request(), 0, np.asarray([1, 2, 3], np.int32))
    entry = run(task)
    assert entry.own_pages().tolist() == [8, 9]
    entry.tail_page = 4
    assert entry.own_pages().tolist() == [8, 9, 4]
    assert not entry.computed
    assert run(task, computed=2).computed
