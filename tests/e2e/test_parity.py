"""The whole server, started from a configuration file on a checkpoint on disk, gives the reference's greedy tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models import make_checkpoint
from tests.serving import serving

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NUM_TOKENS = 32
TIE = 1e-3  # between the reference's own logits, where either token is right
PROMPTS = [[7], [1, 2, 3, 4, 5], list(range(40, 57)), list(range(200)), [*range(200), 9]]


@pytest.mark.parametrize(("config", "family"), [("qwen.toml", "qwen2"), ("llama-1b.toml", "llama")])
def test_greedy_tokens_over_http_equal_the_reference(tmp_path: Path, config: str, family: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family, seed=3, tie_word_embeddings=True)
    options = (
        "--config",
        str(CONFIGS / config),
        f"model.path={folder}",
        "model.served_name=m",
        "model.max_context=auto",
    )
    with serving(tmp_path, *options) as server:

        def ask(prompt: list[int]) -> list[int]:
            status, answer = server.post(
                "/v1/completions",
                model="m",
                prompt=prompt,
                max_tokens=NUM_TOKENS,
                temperature=0,
                ignore_eos=True,
                return_token_ids=True,
            )
            assert status == 200, answer
            ids: list[int] = answer["choices"][0]["token_ids"]
            return ids

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(ask, PROMPTS))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        assert len(tokens) == NUM_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float(gaps.max()) < TIE
