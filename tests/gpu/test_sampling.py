"""Samples of the engine on a GPU follow the exact distribution of their parameters: first tokens and second ones.

First tokens are drawn with a prompt's chunk, second ones by decoding rows, in graphs. Exact is by definition, in
float64, from what transformers computes in float32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.cases.models import make_checkpoint
from tests.cases.sampling_rows import kept_by, name_of, penalised, weights_of
from tests.drivers.gpu_models import DEVICE, Reference, WatchedEngine, make_model
from toka_async.messages import TokenSampling
from toka_async.model.rng import Float64
from toka_async.model.sampling import make_params

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NUM_SAMPLES = 4096
DEVIATIONS = 5.0  # of a chi-square from its mean
LEAST = 5.0  # expected samples of a cell

# The large vocabulary's logits are sharpened, so that samples repeat; its chunks of ids are several.
SMALL = [
    TokenSampling(),
    TokenSampling(temperature=0.6),
    TokenSampling(temperature=1.7),
    TokenSampling(top_p=0.9),
    TokenSampling(temperature=0.6, top_p=0.5),
    TokenSampling(top_k=7),
    TokenSampling(top_k=100),  # more than kernels look at
    TokenSampling(min_p=0.2),
    TokenSampling(repetition_penalty=1.8),
    TokenSampling(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
    TokenSampling(temperature=1.3, min_p=0.1, top_k=30, repetition_penalty=0.7),
]
LARGE = [
    TokenSampling(temperature=0.25),
    TokenSampling(temperature=0.25, top_p=0.9),
    TokenSampling(temperature=0.25, top_p=0.995),  # more candidates than kernels keep
    TokenSampling(temperature=0.25, top_k=40, min_p=0.01, repetition_penalty=1.2),
]


@dataclass(slots=True)
class ChiSquare:
    """Of several tables together."""

    value: float = 0.0
    freedom: int = 0

    def add(self, counts: Counter[int], probabilities: Float64) -> None:
        """Counts of tokens against their exact probabilities; rare tokens are one cell."""
        observed = np.zeros(probabilities.size)
        observed[list(counts)] = list(counts.values())
        assert not observed[probabilities == 0].any(), "a token that cannot be drawn"
        expected = observed.sum() * probabilities
        cells = expected >= LEAST
        pairs = [*zip(observed[cells], expected[cells], strict=True)]
        if (rest := expected[~cells].sum()) >= LEAST:
            pairs.append((observed[~cells].sum(), rest))
        self.value += float(sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs))
        self.freedom += max(len(pairs) - 1, 0)

    @property
    def deviations(self) -> float:
        return (self.value - self.freedom) / math.sqrt(max(2 * self.freedom, 1))

    def __str__(self) -> str:
        return f"{self.value:.0f} of {self.freedom} ({self.deviations:+.1f})"


def exact_probabilities(
    reference: Reference, contexts: Sequence[Sequence[int]], sampling: TokenSampling
) -> list[Float64]:
    """Of the token after each context, all of the same length."""
    with torch.inference_mode():
        logits = reference.exact(torch.tensor(contexts, device=DEVICE)).logits[:, -1].float().cpu()
    seen = np.zeros(logits.shape, dtype=np.bool_)
    for row, context in zip(seen, contexts, strict=True):
        row[list(context)] = True
    params = make_params(sampling)
    edited = penalised(logits, np.repeat(params, len(contexts)), seen)
    weights = [weights_of(row[None], params[0])[0] for row in edited]
    kept = [np.where(kept_by(row, params[0]), row, 0) for row in weights]
    return [row / row.sum() for row in kept]


def check(engine: WatchedEngine, reference: Reference, sampling: TokenSampling, prompt: list[int]) -> None:
    received = engine.run([prompt], n=NUM_SAMPLES, max_tokens=2, sampling=sampling)
    drawn = [sample.token_ids for sample in received[0].samples]
    first = Counter(tokens[0] for tokens in drawn)
    of_first, of_second = ChiSquare(), ChiSquare()
    of_first.add(first, exact_probabilities(reference, [prompt], sampling)[0])
    frequent = [token for token, count in first.most_common(64) if count >= 4 * LEAST]
    contexts = [[*prompt, token] for token in frequent]
    if contexts:
        for token, exact in zip(frequent, exact_probabilities(reference, contexts, sampling), strict=True):
            of_second.add(Counter(tokens[1] for tokens in drawn if tokens[0] == token), exact)
    print(f"\n{name_of(sampling)}: {of_first}, {of_second}", end="")
    assert of_first.freedom > 0
    assert of_first.deviations < DEVIATIONS
    assert of_second.deviations < DEVIATIONS


def start(reference: Reference) -> WatchedEngine:
    return WatchedEngine(
        reference.folder, "float32", grouped=False, max_seqs=1024, max_tokens=2048, max_graph_seqs=1024
    )


Served = tuple[WatchedEngine, Reference]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny model with a vocabulary of bytes."""
    reference = Reference.of(make_checkpoint(tmp_path_factory.mktemp("small"), "llama", seed=1))
    yield start(reference), reference
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    reference = Reference.of(make_model(tmp_path_factory.mktemp("llama"), "llama"))
    yield start(reference), reference
    torch.cuda.empty_cache()


@pytest.mark.parametrize("sampling", SMALL, ids=name_of)
def test_small_vocabulary(small: Served, sampling: TokenSampling) -> None:
    check(*small, sampling, [72, 101, 108, 108, 111, 72])


@pytest.mark.parametrize("sampling", LARGE, ids=name_of)
def test_large_vocabulary(large: Served, sampling: TokenSampling) -> None:
    check(*large, sampling, [31999, 4, 20000, 4, 17])


def test_second_tokens_are_of_graphs(small: Served) -> None:
    engine, _ = small
    before = engine.watch.num_replays
    engine.run([[1, 2, 3]], n=NUM_SAMPLES, max_tokens=3, sampling=SMALL[3])
    assert engine.watch.num_replays > before
