"""Rows give the same whether a prefix that they share is attended to once or by each: random group structures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import pytest
import torch

from tests.drivers.core import Received, Sample
from tests.drivers.gpu_models import VOCAB, Reference, WatchedEngine, make_model
from tests.drivers.page_rank import submit
from toka_async.messages import TokenSampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NUM_STRUCTURES = 6
NUM_SCORED = 3  # of them by transformers, sample by sample
SAMPLED = TokenSampling(temperature=0.7, num_logprobs=0)
Pairs = list[tuple[Sequence[int], Sample]]


@dataclass(slots=True, frozen=True)
class Asked:
    prompt: list[int]
    n: int
    max_tokens: int


def structure(seed: int) -> tuple[list[list[int]], list[Asked]]:
    """Prefixes that are in the cache before, and requests of groups of several sizes, groups in groups, rows alone."""
    rng = np.random.default_rng(seed)

    def ids(most: int) -> list[int]:
        drawn: list[int] = rng.integers(0, VOCAB, int(rng.integers(1, most))).tolist()
        return drawn

    prefixes = [ids(600) for _ in range(rng.integers(1, 5))]
    prefixes += [prefix + ids(100) for prefix in prefixes if rng.random() < 0.4]
    prompts = [prefix + ids(40) for prefix in prefixes for _ in range(rng.integers(1, 7))]
    prompts += [ids(700) for _ in range(rng.integers(0, 5))]
    shuffled = [prompts[i] for i in rng.permutation(len(prompts))]
    asked = [Asked(prompt, int(rng.choice([1, 1, 1, 2, 7])), int(rng.integers(2, 40))) for prompt in shuffled]
    return [prefix for prefix in prefixes if rng.random() < 0.7], asked


def run(engine: WatchedEngine, seed: int) -> list[Received]:
    """Requests of all structures have numbers of their own, which are their seeds."""
    cached, asked = structure(seed)
    engine.run(cached, max_tokens=1)
    first = 1000 * (seed + 1)
    received = [
        engine.driver.submit(submit(first + i, a.prompt, n=a.n, max_tokens=a.max_tokens, sampling=SAMPLED))
        for i, a in enumerate(asked)
    ]
    engine.driver.drain()
    return received


def make_draws(received: Sequence[Received], seed: int) -> Pairs:
    prompts = [asked.prompt for asked in structure(seed)[1]]
    return [(p, sample) for p, result in zip(prompts, received, strict=True) for sample in result.samples]


def num_same(sample: Sample, other: Sample) -> int:
    """Tokens up to the first difference."""
    pairs = zip(sample.token_ids, other.token_ids, strict=True)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.of(make_model(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_in_float32_the_tokens_are_the_same(reference: Reference, graphs: bool) -> None:
    engines = [WatchedEngine(reference.folder, "float32", grouped=grouped, graphs=graphs) for grouped in (True, False)]
    num_samples, num_different, worst = 0, 0, 0.0
    for seed in range(NUM_STRUCTURES):
        ours, alone = (make_draws(run(engine, seed), seed) for engine in engines)
        for (_, sample), (_, other) in zip(ours, alone, strict=True):
            same = num_same(sample, other)
            num_samples += 1
            num_different += same < len(sample.token_ids)
            gaps = np.subtract(sample.logprobs[:same], other.logprobs[:same])
            worst = max(worst, float(np.abs(gaps).max(initial=0)))
    print(f"\n{num_samples} samples, {num_different} not the same, largest gap of log-probs {worst:.1e}", end="")
    assert engines[0].watch.num_grouped > 0
    assert (engines[0].watch.num_grouped_replays > 0) == graphs
    assert engines[1].watch.num_grouped == 0
    assert num_different <= 0.01 * num_samples, "more than a draw between two tokens can explain"
    assert worst < 1e-3


def test_in_bfloat16_the_errors_are_no_larger(reference: Reference) -> None:
    """Against transformers in float32, which scores what each of them drew."""
    errors = []
    for grouped in (True, False):
        engine = WatchedEngine(reference.folder, "bfloat16", grouped=grouped)
        pairs = [pair for seed in range(NUM_SCORED) for pair in make_draws(run(engine, seed), seed)]
        scores, logprobs = reference.score_all(pairs)
        errors.append((logprobs - scores.logprobs).abs())
        assert (engine.watch.num_grouped_replays > 0) == grouped
    ours, alone = (float(error.square().mean().sqrt()) for error in errors)
    print(f"\nerror of log-probs: in groups {ours:.2e}, alone {alone:.2e}, largest {errors[0].max():.2e}", end="")
    assert ours <= 1.2 * alone
    assert float(errors[0].max()) <= 2 * float(errors[1].max())
