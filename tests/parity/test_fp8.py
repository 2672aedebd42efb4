"""What rounding to 8 bits costs: perplexity of a trained model on texts that it was not trained on."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.drivers.engine import Engine
from tests.drivers.paged_rows import PagedRow, run_rows
from tests.scripts import load_script
from toka_async.attention.kv_cache import make_cache
from toka_async.attention.reference import ReferenceAttention
from toka_async.checkpoint.spec import read_spec
from toka_async.model.matrices.ops import Norm, TorchOps
from toka_async.model.matrices.scaling import dequantize, quantize
from toka_async.model.weights import build_decoder, load_weights

ROOT = Path(__file__).resolve().parents[2]
DEMO, NUM_TEXTS, PAGE = ROOT / "toka_async" / "demo", 12, 16


class RoundedInputs(TorchOps):
    """Rounds the inputs of matrices as GPUs do, with a scale for each token; but not those of the head."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        if norm is not None:
            x = self.add_norm(x, None, *norm)[0]
        if len(weight) != self.vocab_size:
            x = dequantize(*quantize(x, 1, x.shape[1]), 1, x.shape[1]).to(x.dtype)
        return super().linear(x, weight, bias)


def write_texts() -> list[list[int]]:
    problems = load_script("demo_problems")
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found = itertools.islice(problems.generate(7, held_out=True), NUM_TEXTS)
    return [tokenizer.encode(problem.prompt + problem.completion).ids for problem in found]


def measure_perplexity(texts: list[list[int]], quantize: str, rounded_inputs: bool = False) -> float:
    spec, device = read_spec(DEMO, quantize), torch.device("cpu")
    ops = RoundedInputs(spec.vocab_size) if rounded_inputs else TorchOps()
    decoder = build_decoder(spec, torch.float32, device, ops=ops)
    load_weights(decoder, DEMO)
    num_pages = sum(-(-len(text) // PAGE) for text in texts)
    cache = make_cache(spec, num_pages, PAGE, torch.float32, device)
    rows = [PagedRow(text, len(text)) for text in texts]
    run_rows(
        decoder, ReferenceAttention(cache, spec.attention.num_heads, spec.windows), rows, PAGE, iter(range(num_pages))
    )
    losses = [
        torch.nn.functional.cross_entropy(torch.cat(row.logits)[:-1].float(), torch.tensor(row.token_ids[1:]))
        for row in rows
    ]
    return float(np.exp(np.mean([float(loss) for loss in losses])))


@pytest.mark.parametrize("rounded_inputs", [False, True])
def test_perplexity_of_the_built_in_model(rounded_inputs: bool) -> None:
    texts = write_texts()
    exact, rounded = measure_perplexity(texts, "none"), measure_perplexity(texts, "fp8", rounded_inputs)
    assert 1 < exact < 20  # it is trained
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.01)


def test_a_start_quantizes() -> None:
    """Half the bytes, and the same likeliest tokens, mostly: it is a trained model."""
    sizes, answers = [], []
    for how in ("none", "fp8"):
        engine = Engine(DEMO, quantize=how)
        sizes.append(engine.runner.ready.ranks[0].weights)
        received = engine.run(write_texts(), max_tokens=8)
        answers.append([answer.samples[0].token_ids for answer in received])
    assert sizes[1] < 0.5 * sizes[0]
    num_same = sum(exact == rounded for exact, rounded in zip(*answers, strict=True))
    assert num_same > NUM_TEXTS / 2
