"""Steps with prompts give the same from graphs as without; `-s` prints errors.

At real head sizes, with decoding rows beside chunks, windows, groups, and prompts of all lengths around those captured.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.drivers.core import Sample
from tests.drivers.gpu_models import ROUTED, SHAPES, VOCAB, WatchedEngine, make_model
from toka_async.messages import TokenSampling
from toka_async.runner.mixed import list_mixed_sizes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
MOST_TOKENS = 512
SAMPLED = TokenSampling(temperature=0.7, num_logprobs=0)
EXACT = 1e-3  # of log-probs, in float32
# Samples that may differ: of 110,420 routes of each model, up to 2 are a choice between experts whose logits differ by
# less than 3e-6.
REROUTED = 2


def make_prompts(lengths: list[int], num_shared: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(len(lengths))
    shared = rng.integers(0, VOCAB, num_shared).tolist()
    return [shared + rng.integers(0, VOCAB, length).tolist() for length in lengths]


def run(engine: WatchedEngine, prompts: list[list[int]], max_tokens: int) -> list[Sample]:
    received = engine.run(prompts, max_tokens=max_tokens, sampling=SAMPLED)
    return [sample for each in received for sample in each.samples]


def compare(samples: list[Sample], others: list[Sample], num_rerouted: int = 0) -> None:
    """A draw between two tokens that are equally likely may differ, after which the samples do.

    num_rerouted: samples of which a token may go to another expert, because the two are equally likely.
    """
    num_different, worst = 0, []
    for sample, other in zip(samples, others, strict=True):
        pairs = zip(sample.token_ids, other.token_ids, strict=True)
        same = next((place for place, (a, b) in enumerate(pairs) if a != b), len(sample.token_ids))
        num_different += same < len(sample.token_ids)
        gaps = np.subtract(sample.logprobs[:same], other.logprobs[:same])
        worst.append(float(np.abs(gaps).max(initial=0)))
    print(f"\n{len(samples)} samples, {num_different} not the same, largest gap of log-probs {max(worst):.1e}", end="")
    assert num_different <= max(1, 0.01 * len(samples)) + num_rerouted
    assert sum(gap >= EXACT for gap in worst) <= num_rerouted, sorted(worst)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_tokens_are_the_same_without_graphs(tmp_path: Path, shape: str, grouped: bool) -> None:
    """Prompts of all lengths come while others decode, in chunks of what a step has room for."""
    folder = make_model(tmp_path, shape)
    lengths = [*np.random.default_rng(0).integers(1, 900, 60).tolist(), 1, 2, 600]
    prompts = make_prompts(lengths, num_shared=200 if grouped else 0)
    engines = [WatchedEngine(folder, "float32", grouped=grouped, graphs=graphs) for graphs in (True, False)]
    samples, others = (run(engine, prompts, 40) for engine in engines)
    compare(samples, others, num_rerouted=REROUTED if shape in ROUTED else 0)
    with_graphs, without = (engine.watch for engine in engines)
    assert with_graphs.num_mixed > 10
    assert with_graphs.num_mixed >= with_graphs.num_chunked
    assert without.num_mixed == 0


def test_prompts_around_each_captured_size(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama")
    engines = [WatchedEngine(folder, "float32", grouped=False, graphs=graphs) for graphs in (True, False)]
    lengths = sorted({size + more for size in list_mixed_sizes(MOST_TOKENS) for more in (-1, 0, 1)})
    for length in lengths:
        samples, others = (run(engine, make_prompts([length]), 2) for engine in engines)
        compare(samples, others)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_nothing_is_compiled_after_the_start(tmp_path: Path, cache_dtype: str) -> None:
    engine = WatchedEngine(make_model(tmp_path, "qwen3"), "bfloat16", grouped=True, cache_dtype=cache_dtype)
    run(engine, make_prompts([*range(1, 400, 13)], num_shared=64), 20)
    assert engine.watch.num_mixed > 0
    assert engine.runner._compiles.count() == 0
