"""Families that differ from Llama by data, through the whole engine and divided, against transformers on a CPU.

One small engine for each: pages that hold less than is asked for, chunks that end anywhere, prompts that begin alike,
samples of one prompt. Tensor ranks and stages are parts of a decoder in this process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.cases.models import GEMMA4_SMALL, heads, make_checkpoint
from tests.drivers.core import Received
from tests.drivers.engine import Engine
from tests.drivers.thread_ranks import run_ranks
from tests.fakes.mean_attention import MeanAttention, in_shards, load, run
from toka_async.checkpoint.division import make_rank_spec, stage_parts
from toka_async.checkpoint.spec import read_spec
from toka_async.messages import TokenSampling
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.weights import build_decoder, load_weights

FACTORS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 7.0], "original_max_position_embeddings": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "exaone4": {},
    "qwen2_moe": {},
    "smollm3": {"num_hidden_layers": 2},
    "phi3": {"rope_scaling": FACTORS | {"type": "longrope"}, "original_max_position_embeddings": 8},
    "granite": {},
    "glm4": {},
    "seed_oss": {},
    "ernie4_5": {},
    "helium": {},
    "ministral": {},
    "ministral3": {},
    "gemma": {},
    "gemma2": {},
    "vaultgemma": {},
    "gemma3_text": {},
    "gemma4_text": {"num_global_key_value_heads": 2},
    "gemma4_text-small": GEMMA4_SMALL,
}
NUM_TOKENS = 12
NEAR = 1e-4  # of log-probs, and of logits that tie
PROMPTS = [[7, 3, 250, 9, 77, 12, 5, 61, 8], [*range(20, 47)], [*range(20, 33)], [9] * 11]


def verify(model: Any, prompts: list[list[int]], received: list[Received]) -> None:
    """Tokens are greedy, and they and the prompt's have the log-probs that the model gives them."""
    for prompt, result in zip(prompts, received, strict=True):
        for sample in result.samples:
            tokens, logprobs = sample.token_ids, sample.logprobs
            assert len(tokens) == NUM_TOKENS
            with torch.inference_mode():
                logits: Tensor = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)
            chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert float((expected.amax(-1) - chosen).max()) < NEAR
            np.testing.assert_allclose(logprobs, chosen, atol=NEAR)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_answers_as_transformers_does(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family.partition("-")[0], seed=2, **FAMILIES[family])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    engine = Engine(folder, page_size=4, num_tokens=96, max_seqs=6, max_tokens=13, until_full=True)
    sampling = TokenSampling(temperature=0.0, num_logprobs=0)
    for suffix in ([], [5, 6]):
        prompts = [prompt + suffix for prompt in PROMPTS]
        received = engine.run(prompts, sampling=sampling, max_tokens=NUM_TOKENS, n=3)
        verify(model, prompts, received)
    assert engine.driver.stats.num_preemptions > 0
    again = [engine.run(PROMPTS[1:2], sampling=sampling, max_tokens=NUM_TOKENS)[0] for _ in range(2)]
    verify(model, PROMPTS[1:2] * 2, again)
    assert again[1].prefilled is not None
    assert again[1].prefilled.cached_tokens == 24


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_and_stages_together_equal_one(tmp_path: Path, family: str) -> None:
    """With tokens on all ranks, and with a share of them on each."""
    fields = heads(4, 2, 32) | FAMILIES[family]
    folder = make_checkpoint(tmp_path, family.partition("-")[0], seed=2, **fields)
    alone = run(load(folder, LocalComm()), num_kv_heads=2)
    for min_tokens in (0, 1):

        def run_rank(comm: Comm, min_tokens: int = min_tokens) -> Tensor:
            return run(load(folder, comm, in_shards(comm) if min_tokens else None), num_kv_heads=1)

        for logits in run_ranks(2, run_rank):
            torch.testing.assert_close(logits, alone, atol=1e-9, rtol=1e-9)
    spec = read_spec(folder)
    assert make_rank_spec(spec, 2).attention.num_heads == 2
    values = torch.arange(len(alone)) * 43 % 261
    for part in stage_parts(spec, 2, 1):
        stage = build_decoder(spec, torch.float64, torch.device("cpu"), part=part)
        load_weights(stage, folder)
        with torch.inference_mode():
            attention = ShiftedAttention(2, part.first)
            values = stage(values, torch.arange(len(alone)) + 3, attention)
            values = stage.logits(values) if part.is_last else values
    torch.testing.assert_close(values, alone, atol=1e-9, rtol=1e-9)


class ShiftedAttention(MeanAttention):
    """Numbers the layers of a stage as those of the model."""

    def __init__(self, num_kv_heads: int, first: int) -> None:
        super().__init__(num_kv_heads)
        self.first = first

    def attend(self, layer: int, *others: Any) -> Tensor:
        return super().attend(layer + self.first, *others)
