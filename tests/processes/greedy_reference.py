"""Greedy tokens over HTTP, and whether they are the reference implementation's (transformers)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.processes.serving import Serving

NUM_TOKENS = 32
TIE = 1e-3  # between the reference's own logits, where either token is right
PROMPTS = [[7], [1, 2, 3, 4, 5], list(range(40, 57)), list(range(200)), [*range(200), 9]]


def ask_all(server: Serving) -> list[list[int]]:
    """The tokens after every prompt, asked for at the same time of the model named m."""

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
        return list(pool.map(ask, PROMPTS))


def check_greedy(model_dir: Path, answers: list[list[int]]) -> None:
    """Each token is the reference's likeliest, or ties with it."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        assert len(tokens) == NUM_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float(gaps.max()) < TIE
