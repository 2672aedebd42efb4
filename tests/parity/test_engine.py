"""Greedy tokens and log-probs of the whole engine against transformers, float32 on a CPU.

Prompts of mixed lengths run together, through pages of several sizes, with and without cached prefixes, and in caches
so small that sequences are preempted.
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
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.cases.models import LLAMA3_ROPE, heads, make_checkpoint
from tests.drivers.core import Received
from tests.drivers.engine import Engine
from tests.drivers.page_rank import submit
from toka_async.arrays import as_f32
from toka_async.attention.blocks import TileLimits, TilePlan
from toka_async.attention.reference import ReferenceAttention
from toka_async.messages import LogprobKind, TokenSampling

NUM_TOKENS = 24  # of each answer: all but the shortest prompts' go beyond the windows
TIE = 1e-3  # the reference's own two best logits, where a different token is no error

LLAMA3 = LLAMA3_ROPE | {"factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-grouped-3": {"rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "llama-biased-wide-heads": {"attention_bias": True, "mlp_bias": True, "head_dim": 20},
    "llama-7-heads-linear": heads(7, 1, 56, head_dim=8, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "qwen2-grouped-3": {"tie_word_embeddings": True},
    "qwen2-5-heads-yarn": heads(5, 5, 60, head_dim=12, rope_scaling=YARN),
    "qwen2-derived-head": {"head_dim": ..., "num_attention_heads": 12, "num_key_value_heads": 4},
    "qwen3-grouped-3": {},
    "qwen3-tied-wide-heads": {"tie_word_embeddings": True, "head_dim": 24},
    "qwen3-biased": heads(5, 1, 40, attention_bias=True),
    "qwen3_moe-mixed-layers": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "gpt_oss-window": {"sliding_window": 20},
    "qwen3_next-mixed-layers": {"mlp_only_layers": [1]},
    "qwen3_5-with-images-tied": {"tie_word_embeddings": True},
    "qwen3_5_moe_text-experts": {},
    "mistral-window": {"sliding_window": 20},
    "mistral-full": {"sliding_window": None, "tie_word_embeddings": True},
    "mistral-7-heads-window": heads(7, 7, 56, head_dim=16, sliding_window=33),
}
# Sampling is the same code for all models, and grouping for all with such attention: these stand for the others.
SAMPLED = ("llama-grouped-3", "qwen3_next-mixed-layers")
ATTENDED = (*SAMPLED, "qwen3-tied-wide-heads", "qwen3-biased", "gpt_oss-window", "mistral-7-heads-window")


@dataclass(slots=True)
class Reference:
    """A checkpoint and what transformers makes of it."""

    folder: Path
    model: Any

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocab], float32."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits

    def count_ties(self, prompt: list[int], generated: list[int]) -> int:
        """Asserts that every token is the reference's greedy one, given those before it, or ties with it.

        Returns the number of ties that were decided otherwise.
        """
        logits = self.logits(prompt + generated)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
        gaps = logits.amax(-1) - chosen
        assert float(gaps.max()) < TIE, f"token {int(gaps.argmax())} is {float(gaps.max())} below the reference's best"
        return int((gaps > 0).sum())


@pytest.fixture(scope="module", params=list(SHAPES))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp(request.param), request.param)


def make_reference(folder: Path, name: str) -> Reference:
    make_checkpoint(folder, name.partition("-")[0], seed=1, **SHAPES[name])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    return Reference(folder, model)


def prompts_of_mixed_lengths() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, length).tolist() for length in (1, 3, 16, 17, 40, 75)]


def verify(reference: Reference, prompts: list[list[int]], received: list[Received]) -> None:
    num_ties = 0
    for prompt, result in zip(prompts, received, strict=True):
        for sample in result.samples:
            assert len(sample.token_ids) == NUM_TOKENS
            num_ties += reference.count_ties(prompt, sample.token_ids)
    assert num_ties <= 1, f"{num_ties} ties were decided otherwise"


def test_cached_prefixes_change_nothing(reference: Reference) -> None:
    engine = Engine(reference.folder, page_size=7)
    prompts = prompts_of_mixed_lengths()
    engine.run(prompts, max_tokens=NUM_TOKENS)
    longer = [[*prompt, 9, 9] for prompt in prompts]
    received = engine.run(longer, max_tokens=NUM_TOKENS)
    verify(reference, longer, received)
    cached = [r.prefilled.cached_tokens for r in received if r.prefilled is not None]
    assert cached == [len(prompt) // 7 * 7 for prompt in prompts]


def test_preemption_changes_nothing(reference: Reference) -> None:
    """In pages of one token; the other tests have larger ones."""
    engine = Engine(reference.folder, page_size=1, num_tokens=200, max_seqs=6, until_full=True)
    prompts = prompts_of_mixed_lengths()
    received = engine.run(prompts, max_tokens=NUM_TOKENS)
    verify(reference, prompts, received)
    assert engine.driver.stats.num_preemptions > 0


def test_samples_share_their_prompt(reference: Reference) -> None:
    engine = Engine(reference.folder, page_size=7)
    prompt = prompts_of_mixed_lengths()[4]
    received = engine.run([prompt], n=3, max_tokens=NUM_TOKENS)
    verify(reference, [prompt], received)
    assert engine.driver.stats.prompt_tokens == len(prompt) - 1


def test_logprobs_of_prompt_and_output(reference: Reference) -> None:
    engine = Engine(reference.folder, page_size=16, max_tokens=23)
    prompts = prompts_of_mixed_lengths()
    sampling = TokenSampling(temperature=0.0, num_logprobs=2, num_prompt_logprobs=1)
    received = engine.run(prompts, sampling=sampling, max_tokens=NUM_TOKENS)
    verify(reference, prompts, received)
    for prompt, result in zip(prompts, received, strict=True):
        sample = result.samples[0]
        tokens = prompt + sample.token_ids
        exact = reference.logits(tokens).log_softmax(-1)[:-1]
        chosen = exact.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
        assert result.prefilled is not None
        ours = np.concatenate([as_f32(result.prefilled.logprobs), np.asarray(sample.logprobs)])
        np.testing.assert_allclose(ours, chosen, atol=1e-4)
        best = exact.amax(-1).numpy()[: len(prompt) - 1]
        np.testing.assert_allclose(as_f32(result.prefilled.top_logprobs), best, atol=1e-4)


@pytest.mark.parametrize("reference", SAMPLED, indirect=True)
def test_log_probs_are_of_the_distribution_that_is_sampled_from(reference: Reference) -> None:
    """By definition: the tokens that the filters keep share all of the probability."""
    engine = Engine(reference.folder, page_size=16, max_tokens=23)
    prompts = prompts_of_mixed_lengths()[:3]
    of_kind = {
        kind: TokenSampling(
            temperature=0.7, top_k=5, num_logprobs=0, num_prompt_logprobs=0, logprob_kind=kind, prompt_temperature=0.7
        )
        for kind in (LogprobKind.TEMPERATURE, LogprobKind.PROCESSED)
    }
    for kind, sampling in of_kind.items():
        for prompt, result in zip(prompts, engine.run(prompts, sampling=sampling, max_tokens=6), strict=True):
            sample = result.samples[0]
            tokens = prompt + sample.token_ids
            scaled = reference.logits(tokens)[:-1] / 0.7
            assert result.prefilled is not None
            of_prompt = scaled.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[: len(prompt) - 1, 0]
            np.testing.assert_allclose(as_f32(result.prefilled.logprobs), of_prompt.numpy(), atol=1e-4)
            scaled = scaled[len(prompt) - 1 :]
            if kind is LogprobKind.PROCESSED:
                scaled = scaled.masked_fill(scaled < scaled.topk(5).values[:, -1:], -torch.inf)
                assert sample.kept == [5] * 6
            exact = scaled.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            np.testing.assert_allclose(sample.logprobs, exact.numpy(), atol=1e-4)


def test_processed_log_probs_are_of_what_transformers_would_sample_from(tmp_path: Path) -> None:
    """With penalties, temperature and all filters: its processors, over the logits of its model."""
    reference = make_reference(tmp_path, "qwen3-grouped-3")
    engine = Engine(reference.folder, page_size=16, max_tokens=23)
    sampling = TokenSampling(
        temperature=0.8,
        repetition_penalty=1.3,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        num_logprobs=0,
        logprob_kind=LogprobKind.PROCESSED,
    )
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.8),
            MinPLogitsWarper(0.01),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.95),
        ]
    )
    prompts = prompts_of_mixed_lengths()[:3]
    for prompt, result in zip(prompts, engine.run(prompts, sampling=sampling, max_tokens=8), strict=True):
        (sample,) = result.samples
        tokens = prompt + sample.token_ids
        logits = reference.logits(tokens)
        for place, token in enumerate(sample.token_ids, start=len(prompt)):
            kept = processors(torch.tensor([tokens[:place]]), logits[place - 1 : place])[0]  # type: ignore[arg-type]
            assert sample.kept[place - len(prompt)] == int(kept.isfinite().sum())
            exact = float(kept.log_softmax(-1)[token])
            np.testing.assert_allclose(sample.logprobs[place - len(prompt)], exact, atol=1e-5)


@pytest.mark.parametrize("reference", SAMPLED, indirect=True)
def test_samples_of_a_seed_of_63_bits_are_distinct_and_the_same_on_any_replica(reference: Reference) -> None:
    """However they are placed: what else runs, and in which slots, differs between the two engines."""
    prompt, seed = prompts_of_mixed_lengths()[3], 2**63 - 3
    sampling = TokenSampling(temperature=5.0)
    answers = []
    for max_seqs in (9, 3):
        engine = Engine(reference.folder, page_size=8, max_seqs=max_seqs)
        engine.driver.submit(submit(5, [1, 2, 3], max_tokens=7, sampling=sampling, seed=seed))
        asked = engine.driver.submit(submit(7, prompt, n=8, max_tokens=12, sampling=sampling, seed=seed))
        engine.driver.drain()
        answers.append([sample.token_ids for sample in asked.samples])
        assert len(set(map(tuple, answers[-1]))) == 8
    assert answers[0] == answers[1]


@pytest.mark.parametrize("reference", ATTENDED, indirect=True)
def test_groups_with_a_shared_prefix_change_nothing(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of one prompt, and prompts with a common prefix, are attended to in two parts, however small."""
    merged: list[int] = []
    in_two_parts = ReferenceAttention._attend_grouped

    def counting(self: ReferenceAttention, plan: TilePlan, rows: Tensor, *rest: Any) -> Tensor:
        merged.append(rows.numel())
        return in_two_parts(self, plan, rows, *rest)

    monkeypatch.setattr(ReferenceAttention, "_attend_grouped", counting)
    monkeypatch.setattr("toka_async.attention.reference.TileLimits", partial(TileLimits, shared_bytes=0))
    engine = Engine(reference.folder, page_size=4, group_min_seqs=2, group_min_tokens=8, max_tokens=256)
    prompts = prompts_of_mixed_lengths()
    engine.run(prompts[4:], max_tokens=1)
    together = [[*prompt, 9, i] for prompt in prompts[4:] for i in range(3)]
    verify(reference, together, engine.run(together, max_tokens=NUM_TOKENS))
    verify(reference, prompts[3:], engine.run(prompts[3:], n=4, max_tokens=NUM_TOKENS))
    assert merged or reference.model.config.sliding_window, "no rows were grouped"
