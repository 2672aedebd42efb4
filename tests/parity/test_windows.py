"""Models whose layers have a sliding window, through the whole engine, against transformers on a CPU.

Pages behind windows are given back: by long sequences and prompts, when prompts begin alike, when sequences are
preempted, in chunks that end anywhere. Divisions: tests/unit/runner/test_pipeline_of_models.py, tests/e2e.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.cases.models import make_checkpoint
from tests.drivers.core import Received
from tests.drivers.engine import Engine
from toka_async.attention.blocks import TileLimits
from toka_async.messages import TokenSampling

WINDOW = 9
FAMILIES = ("gemma3_text", "gpt_oss", "mistral")
NEAR = 1e-4  # of log-probs, and of logits that tie
SCORED = TokenSampling(temperature=0.0, num_logprobs=0)
NUM_TOKENS = 30


@dataclass(slots=True)
class Reference:
    """A checkpoint and what transformers makes of it."""

    folder: Path
    model: Any

    def verify(self, prompts: list[list[int]], received: list[Received]) -> None:
        """Tokens are greedy, and have the log-probs that the model gives them."""
        for prompt, result in zip(prompts, received, strict=True):
            for sample in result.samples:
                tokens = sample.token_ids
                assert len(tokens) == NUM_TOKENS
                with torch.inference_mode():
                    logits: Tensor = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
                expected = logits.log_softmax(-1)
                chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                assert float((expected.amax(-1) - chosen).max()) < NEAR
                np.testing.assert_allclose(sample.logprobs, chosen, atol=NEAR)


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder, request.param, seed=2, sliding_window=WINDOW)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return Reference(folder, model.eval())


def make_prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, length).tolist() for length in lengths]


def poison(engine: Engine) -> None:
    """Nothing may be read of window pages that nobody has written since."""
    cache: Any = engine.runner.cache
    parts = [part for part in getattr(cache, "parts", [cache]) if part.of_windows]
    assert parts
    for tensor in (tensor for part in parts for tensor in (*part.keys, *part.values)):
        tensor.fill_(1e4)


def test_prompts_of_several_windows_in_chunks_that_end_anywhere(reference: Reference) -> None:
    prompts = make_prompts(5 * WINDOW, 3 * WINDOW + 1, 8, 1)
    for page_size, max_tokens in ((4, 5), (3, 7), (1, 64)):
        engine = Engine(reference.folder, page_size=page_size, num_tokens=400, max_seqs=4, max_tokens=max_tokens)
        poison(engine)
        reference.verify(prompts, engine.run(prompts, sampling=SCORED, max_tokens=NUM_TOKENS))
        assert 0 < engine.runner.ready.num_window_pages < engine.runner.ready.num_pages
        engine.driver.core.check()


def test_hits_and_hits_that_are_cut_back(reference: Reference) -> None:
    engine = Engine(reference.folder, page_size=4, num_tokens=268, max_seqs=4, max_tokens=64)
    poison(engine)
    run = partial(engine.run, sampling=SCORED, max_tokens=NUM_TOKENS)
    first, other = make_prompts(60, 70)
    cached = []
    for prompt in ([*first], [*first, 5, 6], [*other], first[:50], first[:50]):
        (received,) = run([prompt])
        reference.verify([prompt], [received])
        assert received.prefilled is not None
        cached.append(received.prefilled.cached_tokens)
    assert cached[1] == 60
    assert cached[3] < 48, "the tree knows 48 tokens, and others took window pages"
    assert cached[4] == 48, "they were computed again"


def test_preemption_and_samples(reference: Reference) -> None:
    """Window pages run short, and sequences are computed again; samples copy a page that is not full."""
    engine = Engine(reference.folder, page_size=4, num_tokens=240, max_seqs=6, max_tokens=13, until_full=True)
    poison(engine)
    prompts = make_prompts(50, 33, 8)
    for suffix in ([], [5, 6]):
        longer = [prompt + suffix for prompt in prompts]
        reference.verify(longer, engine.run(longer, sampling=SCORED, max_tokens=NUM_TOKENS, n=3))
    assert engine.driver.stats.num_preemptions > 0


def test_groups_of_rows_within_the_window_and_beyond(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows share a prefix that some see through the window, and some do not any more."""
    monkeypatch.setattr("toka_async.attention.reference.TileLimits", partial(TileLimits, shared_bytes=0))
    engine = Engine(
        reference.folder, page_size=2, num_tokens=400, max_seqs=9, max_tokens=64, group_min_seqs=2, group_min_tokens=4
    )
    poison(engine)
    (prompt,) = make_prompts(7)
    prompts = [prompt, [*prompt, 3], [*prompt, 3, 4]]
    reference.verify(prompts, engine.run(prompts, sampling=SCORED, max_tokens=NUM_TOKENS, n=3))
