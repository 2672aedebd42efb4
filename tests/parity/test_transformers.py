"""Models through transformers in the whole engine, against that library's own attention, float32 on a CPU.

Prompts of mixed lengths run together in chunks cut anywhere, with cached prefixes, samples that fork, and preemption.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cases.foreign_models import make_foreign
from tests.cases.models import make_checkpoint
from tests.drivers.core import Received
from tests.drivers.engine import Engine
from tests.processes.greedy_reference import ask_all, check_greedy
from tests.processes.serving import serving
from toka_async.arrays import as_f32
from toka_async.messages import TokenSampling

NUM_TOKENS = 30  # of each answer
TIE = 1e-3  # the reference's own two best logits, where a different token is no error
LOGPROBS = TokenSampling(temperature=0.0, num_logprobs=1, num_prompt_logprobs=1)
FAMILIES = [
    *("starcoder2", "cohere", "gpt_oss", "deepseek_v3", "apertus"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "nemotron",
            "granite_swa",
            "gpt_neox",
            "qwen2_moe",
            "stablelm",
            "olmo",
            "persimmon",
            "gpt2",
            "opt",
            "gemma2",
        )
    ),
]


@dataclass(slots=True)
class Reference:
    folder: Path
    model: Any

    def compute_logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocab], float32."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits.log_softmax(-1)

    def verify(self, prompts: list[list[int]], received: list[Received]) -> None:
        """Asserts that all tokens are the likeliest, and their log-probs and those of prompts equal."""
        for prompt, result in zip(prompts, received, strict=True):
            for sample in result.samples:
                assert len(sample.token_ids) == NUM_TOKENS
                exact = self.compute_logprobs([*prompt, *sample.token_ids])[:-1]
                tokens = torch.tensor([*prompt, *sample.token_ids][1:])
                chosen = exact.gather(1, tokens[:, None])[:, 0]
                start = len(prompt) - 1
                assert float((exact.amax(-1) - chosen)[start:].max()) < TIE
                np.testing.assert_allclose(np.asarray(sample.logprobs), chosen[start:].numpy(), atol=1e-4)
                if result.prefilled is not None and len(as_f32(result.prefilled.logprobs)):
                    np.testing.assert_allclose(as_f32(result.prefilled.logprobs), chosen[:start].numpy(), atol=1e-4)


def load_reference(folder: Path) -> Reference:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return Reference(folder, model.eval())


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_reference(make_foreign(tmp_path_factory.mktemp(request.param), request.param, seed=1))


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, length).tolist() for length in (1, 3, 16, 17, 40, 75)]


def test_tokens_and_logprobs_equal_the_reference(reference: Reference) -> None:
    """The second round finds prefixes in the cache, and each of its prompts has three samples."""
    engine = Engine(reference.folder, page_size=7, max_tokens=23, impl="transformers")
    prompts = make_prompts()
    reference.verify(prompts, engine.run(prompts, sampling=LOGPROBS, max_tokens=NUM_TOKENS))
    longer = [[*prompt, 9, 9] for prompt in prompts]
    received = engine.run(longer, n=3, sampling=TokenSampling(temperature=0.0, num_logprobs=1), max_tokens=NUM_TOKENS)
    reference.verify(longer, received)
    assert sum(each.prefilled.cached_tokens for each in received if each.prefilled is not None) > 100


@pytest.mark.parametrize("reference", ["starcoder2", "gpt_neox"], indirect=True)
def test_preemption_changes_nothing(reference: Reference) -> None:
    engine = Engine(
        reference.folder, page_size=5, num_tokens=170, max_seqs=6, until_full=True, impl="transformers", max_tokens=64
    )
    prompts = make_prompts()
    sampling = TokenSampling(temperature=0.0, num_logprobs=1)
    reference.verify(prompts, engine.run(prompts, sampling=sampling, max_tokens=NUM_TOKENS))
    assert engine.driver.stats.num_preemptions > 0


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_native_family_gives_the_same_through_the_library(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family, tie_word_embeddings=family == "llama")
    answers = []
    for impl in ("native", "transformers"):
        engine = Engine(folder, page_size=7, max_tokens=23, impl=impl)
        received = engine.run(make_prompts(), sampling=LOGPROBS, max_tokens=NUM_TOKENS)
        answers.append([(result.samples[0].token_ids, result.samples[0].logprobs) for result in received])
    for (tokens, logprobs), (others, of_others) in zip(*answers, strict=True):
        assert tokens == others
        np.testing.assert_allclose(logprobs, of_others, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("starcoder2", ()),
        pytest.param("cohere", ("parallel.tp=2",), marks=pytest.mark.slow),
        pytest.param("gpt_neox", ("parallel.pp=2",), marks=pytest.mark.slow),
        pytest.param("granite_swa", ("parallel.tp=2",), marks=pytest.mark.slow),
        pytest.param(
            "qwen2_moe", ("parallel.tp=2", "parallel.pp=2", "model.impl=transformers"), marks=pytest.mark.slow
        ),
        pytest.param("phi3", ("parallel.tp=2", "model.impl=transformers"), marks=pytest.mark.slow),
    ],
)
def test_a_server_gives_the_greedy_tokens_of_the_reference(
    tmp_path: Path, model_type: str, options: tuple[str, ...]
) -> None:
    folder = make_foreign(tmp_path / "model", model_type, seed=3)
    with serving(tmp_path, f"model.path={folder}", "model.served_name=m", *options) as server:
        answers = ask_all(server)
    check_greedy(folder, answers)
