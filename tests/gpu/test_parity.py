"""Greedy tokens and log-probs of the engine on a GPU against transformers, at real head sizes; `-s` prints a table.

In bfloat16 neither is exact: both are compared with transformers in float32, and ours may not err more than theirs.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.drivers.core import Sample
from tests.drivers.gpu_models import ROUTED, SHAPES, VOCAB, Reference, WatchedEngine, make_model
from toka_async.messages import TokenSampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NUM_TOKENS = 48
LOGPROBS = TokenSampling(temperature=0.0, num_logprobs=0)
EXACT = 1e-3  # in float32, of logits and log-probs
TIMES_THEIRS = 1.2  # in bfloat16, of transformers' own error
TIMES_THEIRS_ROUTED = 2.0  # of models with experts: a rounding may send a token to other ones, which is a large error
CHANCE = 0.02  # share of tokens whose likeliest may change by chance: three deviations of a rare event in a thousand

HEADER = f"\n{'shape':8} {'dtype':9} {'attention':10} {'graphs':6} {'rows':7} {'tokens':>6}  same greedy (theirs)"
TITLE = HEADER + "  worst gap (theirs)  log-prob error: mean (theirs) max (theirs)"


@dataclass(slots=True, frozen=True)
class Case:
    dtype: str
    backend: str
    graphs: bool

    def __str__(self) -> str:
        return f"{self.dtype}-{self.backend}-{'graphs' if self.graphs else 'no graphs'}"


CASES = [Case(dtype, "triton", graphs) for dtype in ("float32", "bfloat16") for graphs in (True, False)]
AUTO = Case("bfloat16", "auto", graphs=False)  # so that what was measured to be fastest computes every step


@dataclass(slots=True)
class Errors:
    """Of one run, ours and transformers' in the engine's place; share: of tokens that are not the likeliest."""

    share: tuple[float, float]
    gap: tuple[float, float]
    mean: tuple[float, float]
    most: tuple[float, float]
    root: tuple[float, float]

    @classmethod
    def of(cls, reference: Reference, samples: Sequence[tuple[Sequence[int], Sample]]) -> Errors:
        scores, logprobs = reference.score_all(samples)
        gaps = scores.gaps, scores.bf16_gaps
        errors = [(values - scores.logprobs).abs() for values in (logprobs, scores.bf16_logprobs)]
        return cls(
            share=both([float((gap > 0).float().mean()) for gap in gaps]),
            gap=both([float(gap.max()) for gap in gaps]),
            mean=both([float(error.mean()) for error in errors]),
            most=both([float(error.max()) for error in errors]),
            root=both([root_mean_square(error) for error in errors]),
        )

    def __str__(self) -> str:
        same = f"{1 - self.share[0]:10.2%} ({1 - self.share[1]:.2%})"
        gap = f"{self.gap[0]:10.1e} ({self.gap[1]:.1e})"
        return f"{same:>20} {gap:>20} {self.mean[0]:17.1e} ({self.mean[1]:.1e}) {self.most[0]:.1e} ({self.most[1]:.1e})"


def both(values: Sequence[float]) -> tuple[float, float]:
    ours, theirs = values
    return ours, theirs


def root_mean_square(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@pytest.fixture(scope="module", params=list(SHAPES))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    made = Reference.of(make_model(tmp_path_factory.mktemp("models") / request.param, request.param))
    yield made
    made.known.clear()
    gc.collect()
    torch.cuda.empty_cache()


def prompts_of_mixed_lengths() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, length).tolist() for length in (1, 5, 16, 33, 100, 257, 400, 700)]


def alone(engine: WatchedEngine) -> list[tuple[Sequence[int], Sample]]:
    """Rows that share nothing."""
    prompts = prompts_of_mixed_lengths()
    received = engine.run(prompts, sampling=LOGPROBS, max_tokens=NUM_TOKENS)
    return [(prompt, result.samples[0]) for prompt, result in zip(prompts, received, strict=True)]


def in_groups(engine: WatchedEngine) -> list[tuple[Sequence[int], Sample]]:
    """Rows that share the longer prompts, a few each."""
    prompts = prompts_of_mixed_lengths()[3:]
    engine.run(prompts, max_tokens=1)
    longer = [[*prompt, 9, i] for prompt in prompts for i in range(4)]
    received = engine.run(longer, sampling=LOGPROBS, max_tokens=NUM_TOKENS)
    return [(prompt, result.samples[0]) for prompt, result in zip(longer, received, strict=True)]


def check(case: Case, errors: Errors, is_routed: bool = False) -> None:
    if case.dtype == "float32":
        assert errors.gap[0] < EXACT
        assert errors.most[0] < EXACT
        return
    assert errors.root[0] <= (TIMES_THEIRS_ROUTED if is_routed else TIMES_THEIRS) * errors.root[1]
    assert errors.mean[0] <= TIMES_THEIRS * errors.mean[1]
    assert errors.most[0] <= 2 * errors.most[1], "one token is far off"
    assert errors.share[0] <= TIMES_THEIRS * errors.share[1] + CHANCE
    assert errors.gap[0] <= 2 * max(errors.gap[1], 2 * errors.root[1]), "a token that is not nearly the likeliest"


@pytest.mark.parametrize("case", [*CASES, AUTO], ids=str)
def test_tokens_and_logprobs(case: Case, reference: Reference) -> None:
    """Alone and in groups; nothing is compiled once the engine is ready."""
    shape = reference.folder.name
    if case is AUTO and (shape not in ("llama", "qwen3") or importlib.util.find_spec("flashinfer") is None):
        pytest.skip("FlashInfer is tried at two shapes, where it is installed")
    engine = WatchedEngine(
        reference.folder, case.dtype, grouped=True, graphs=case.graphs, backend=case.backend, page_size=16
    )
    table = [TITLE]
    for rows in (alone, in_groups):
        samples = rows(engine)
        assert all(len(sample.token_ids) == NUM_TOKENS for _, sample in samples)
        errors = Errors.of(reference, samples)
        name = f"{shape:8} {case.dtype:9} {case.backend:10} {'yes' if case.graphs else 'no':6}"
        count = sum(len(sample.token_ids) for _, sample in samples)
        table.append(f"{name} {rows.__name__.removeprefix('in_'):7} {count:6} {errors}")
        assert (engine.watch.num_grouped > 0) == (rows is in_groups)
        check(case, errors, is_routed=shape in ROUTED)
    print("\n".join(table), end="")
    assert (engine.watch.num_replays > NUM_TOKENS) == case.graphs
    assert (engine.watch.num_grouped_replays > 0) == case.graphs
    assert engine.driver.stats.num_compiles == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_models_that_transformers_computes(case: Case, tmp_path: Path) -> None:
    """Its layers around our attention, captured too."""
    reference = Reference.of(make_model(tmp_path / "llama", "llama"))
    engine = WatchedEngine(
        reference.folder, case.dtype, grouped=True, graphs=case.graphs, backend=case.backend, impl="transformers"
    )
    for rows in (alone, in_groups):
        check(case, Errors.of(reference, rows(engine)))
    assert (engine.watch.num_replays > NUM_TOKENS) == case.graphs
    assert engine.driver.stats.num_compiles == 0
