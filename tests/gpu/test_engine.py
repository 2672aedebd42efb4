"""The engine on a GPU: the same greedy tokens as transformers gives, and as the CPU gives for the built-in model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.cases.models import make_checkpoint
from tests.drivers.engine import Engine
from tests.parity.test_engine import SHAPES, TIE, prompts_of_mixed_lengths
from toka_async.bench.loads.texts import word_problem
from toka_async.checkpoint.hub import resolve_model
from toka_async.messages import TokenSampling
from toka_async.scheduler.step_budget import StepLimits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("num_tokens", [200, 8192])
def test_greedy_tokens_equal_the_reference(shape: str, num_tokens: int, tmp_path: Path) -> None:
    """With 200 tokens of cache, sequences are preempted."""
    folder = make_checkpoint(tmp_path, shape.partition("-")[0], seed=1, **SHAPES[shape])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.to("cuda").eval()
    engine = Engine(folder, page_size=5, num_tokens=num_tokens, device="cuda", until_full=num_tokens < 1000)
    prompts = prompts_of_mixed_lengths()
    for prompt, received in zip(prompts, engine.run(prompts), strict=True):
        tokens = received.samples[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1]
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        assert float(gaps.max()) < TIE


def test_the_built_in_model_answers_alike_on_cpu_and_gpu() -> None:
    """The same text, of 64 tokens after 32 questions."""
    folder = resolve_model("demo")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    draw = random.Random(0)
    prompts = [f"Question: {word_problem(draw).question}\nAnswer:" for _ in range(32)]
    texts = []
    for device in ("cpu", "cuda"):
        engine = Engine(folder, device=device, max_seqs=32, max_tokens=256, num_tokens=16384)
        received = engine.run([tokenizer.encode(prompt).ids for prompt in prompts], max_tokens=64)
        texts.append([tokenizer.decode(r.samples[0].token_ids) for r in received])
    assert len(set(texts[0])) > 16, "answers to different questions are the same"
    assert texts[0] == texts[1]


def test_a_cache_in_fp8_answers_alike_on_cpu_and_gpu() -> None:
    """Keys that lie between two numbers of E4M3 may be rounded to either, so few answers may differ."""
    folder, draw = resolve_model("demo"), random.Random(2)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(f"Question: {word_problem(draw).question}\nAnswer:").ids for _ in range(32)]
    answers = []
    for device in ("cpu", "cuda"):
        engine = Engine(folder, device=device, max_seqs=32, max_tokens=256, num_tokens=16384, cache_dtype="fp8")
        answers.append([each.samples[0].token_ids for each in engine.run(prompts, max_tokens=64)])
    same = sum(a == b for a, b in zip(*answers, strict=True))
    assert same >= 28, f"{same} of 32 answers agree"


def test_short_steps_give_the_same_tokens() -> None:
    """A start measures what a token takes; with a limit below any step's time, prompts are computed in small chunks."""
    folder, draw = resolve_model("demo"), random.Random(1)
    prompts = [[draw.randrange(20, 200) for _ in range(draw.randrange(300, 900))] for _ in range(12)]
    tokens = []
    for limits in (StepLimits(), StepLimits(seconds=1e-6, streaming=1e-6, least_tokens=16)):
        engine = Engine(folder, device="cuda", max_tokens=4096, num_tokens=32768, step_limits=limits)
        assert engine.runner.ready.token_seconds > 0
        received = engine.run(prompts, max_tokens=24, stream=True)
        tokens.append([each.samples[0].token_ids for each in received])
    same = sum(a == b for a, b in zip(*tokens, strict=True))
    assert same >= 11, f"{same} of 12 answers agree"


def test_seeded_samples_are_alike_on_cpu_and_gpu() -> None:
    folder = resolve_model("demo")
    sampling = TokenSampling(temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.05)
    tokens = []
    for device in ("cpu", "cuda"):
        received = Engine(folder, device=device).run([[40, 50, 60]], n=16, max_tokens=32, sampling=sampling)
        tokens.append([sample.token_ids for sample in received[0].samples])
    same = sum(a == b for a, b in zip(*tokens, strict=True))
    assert same >= 14, f"{same} of 16 samples agree"
