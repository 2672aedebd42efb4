"""A cache in E4M3 next to a plain one, on the built-in model, which is trained: logits and perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import toka_async
from tests.drivers.engine import Engine
from tests.drivers.paged_rows import PagedRow, run_rows
from toka_async.attention.kv_cache import E4M3, CacheFormat, KVCache, LayerScales
from toka_async.attention.reference import ReferenceAttention
from toka_async.checkpoint.spec import read_spec
from toka_async.model.weights import build_decoder, load_weights
from toka_async.text.tokenizer import Tokenizer

DEMO = Path(toka_async.__file__).parent / "demo"
CPU = torch.device("cpu")
SPEC = read_spec(DEMO)
QUESTIONS = (
    "Wei has 24 apples. Ivan has 2 times as many apples as Wei. How many apples do they have together?",
    "Ana has 12 pens. She gives 5 pens to Tom. How many pens does Ana have?",
    "There are 3 boxes with 14 coins each. How many coins are there?",
)
TOKENS = 60  # of each answer


def compute_logits(texts: Sequence[list[int]], stored: CacheFormat | None, prompt: float = 0.5) -> list[Tensor]:
    """Logits of all tokens of each text. That share of it is a prompt, in chunks; the others are decoded one by one."""
    decoder = build_decoder(SPEC, torch.float32, CPU)
    load_weights(decoder, DEMO)
    rows = [PagedRow(text, int(len(text) * prompt)) for text in texts]
    num_pages = sum(-(-len(text) // 16) for text in texts)
    shape = SPEC.num_layers, num_pages, SPEC.attention.num_kv_heads, 16, SPEC.attention.head_dim
    kv_cache = KVCache(*shape, torch.float32, CPU, stored=stored)
    attention = ReferenceAttention(kv_cache, SPEC.attention.num_heads, SPEC.windows)
    run_rows(decoder, attention, rows, 16, iter(np.random.default_rng(1).permutation(num_pages).tolist()))
    return [torch.cat(row.logits) for row in rows]


@cache
def sample_texts() -> list[list[int]]:
    """Questions and answers that the model with a plain cache draws at temperature 1."""
    generator = torch.Generator().manual_seed(0)
    tokenizer = Tokenizer.load(DEMO)
    texts = [[*tokenizer.encode(question)] for question in QUESTIONS]
    for _ in range(TOKENS):
        for text, logits in zip(texts, compute_logits(texts, None, prompt=1.0), strict=True):
            text.append(int(logits[-1].softmax(-1).multinomial(1, generator=generator)))
    return texts


def compute_perplexity(texts: Sequence[list[int]], logits: Sequence[Tensor]) -> float:
    losses = [
        -each[:-1].log_softmax(-1).gather(1, torch.tensor(text)[1:, None])
        for text, each in zip(texts, logits, strict=True)
    ]
    return float(torch.cat(losses).mean().exp())


def test_cuts_change_no_bit_where_none_may() -> None:
    """A token attends to its own key as it is stored, however prompts are cut."""
    prompts = [text[: len(text) // 2] for text in sample_texts()]
    tokens = []
    for max_tokens in (16, 512):
        engine = Engine(DEMO, cache_dtype="fp8", batch_invariant=True, max_tokens=max_tokens)
        tokens.append([each.samples[0].token_ids for each in engine.run(prompts, max_tokens=20)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("scales", [(), (LayerScales(0.05, 0.02),) * SPEC.num_layers], ids=["without scales", "scales"])
def test_perplexity_stays_within_one_percent(scales: tuple[LayerScales, ...]) -> None:
    texts = sample_texts()
    plain, small = compute_logits(texts, None), compute_logits(texts, CacheFormat(E4M3, scales))
    errors = torch.cat(small) - torch.cat(plain)
    assert 0 < float(errors.abs().mean()) < 0.1 * float(torch.cat(plain).std())
    assert compute_perplexity(texts, small) == pytest.approx(compute_perplexity(texts, plain), rel=0.01)
