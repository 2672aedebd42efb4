"""Experts with weights of 8-bit floats (E4M3) and scales, in the whole engine, against transformers on a CPU.

transformers runs a dense checkpoint in float32, whose matrices are the values times their scales. The few lines below
compute these, not the project's own arithmetic of 8-bit floats. Scales are drawn, so that blocks and channels differ
much more than those of rounded weights: one at a wrong place changes log-probs far beyond the tolerance.

The project rounds inputs of products to 8 bits only where kernels do (see `model/matrices/fp8.py`). On a CPU it
dequantizes weights and leaves inputs as they are, so that both sides differ only by the rounding of float32.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.cases.models import heads, make_checkpoint
from tests.cases.quantized import BLOCKS, CHANNELS
from tests.drivers.core import Received
from tests.drivers.engine import Engine
from toka_async.arrays import as_f32
from toka_async.messages import TokenSampling

FP8, SIDE = torch.float8_e4m3fn, 128
NUM_TOKENS = 12
NEAR = 1e-4  # of log-probs, and of logits that tie
PROMPTS = [[7, 3, 250, 9, 77, 12, 5, 61, 8], [*range(20, 47)], [*range(20, 33)], [9] * 11]
# Two or three blocks each way: neither all alike, nor all square.
SIZES = heads(4, 2, 256, head_dim=64, intermediate_size=384)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "moe_intermediate_size": 256,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
    },
    "mixtral": {},
}
ROUTERS = ["model.layers.0.mlp.gate", "model.layers.2.mlp.gate"]
FORMATS: dict[str, dict[str, Any]] = {
    "blocks": BLOCKS | {"modules_to_not_convert": ["lm_head", *ROUTERS]},
    "channels": CHANNELS | {"ignore": ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"]},
}


def draw(weight: Tensor, by_block: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns values in E4M3 and scales as published: for each block in float32, or each output in bfloat16 [n, 1]."""
    n, k = weight.shape
    largest = weight.abs().max()
    shape = (-(-n // SIDE), -(-k // SIDE)) if by_block else (n, 1)
    scales = (torch.rand(shape, generator=generator) + 0.5) * largest / 448
    return (weight / largest * 448).to(FP8), scales if by_block else scales.bfloat16()


def multiply(values: Tensor, scales: Tensor, by_block: bool) -> Tensor:
    """Returns the numbers [n, k] that values and scales stand for."""
    scales = scales.float()
    if by_block:
        n, k = values.shape
        scales = scales.repeat_interleave(SIDE, 0)[:n].repeat_interleave(SIDE, 1)[:, :k]
    return values.float() * scales


def make_checkpoints(folder: Path, family: str, scaling: str) -> tuple[Path, Path]:
    """Returns a checkpoint of 8-bit floats, and the dense one of the same model."""
    dense = make_checkpoint(folder / "dense", family, seed=4, **SIZES | FAMILIES[family])
    packed = shutil.copytree(dense, folder / "packed")
    by_block, generator = scaling == "blocks", torch.Generator().manual_seed(6)
    numbers, stored = load_file(dense / "model.safetensors"), {}
    for name, tensor in numbers.items():
        stored[name] = tensor
        if "_proj." in name or ".experts." in name:
            stored[name], scales = draw(tensor, by_block, generator)
            stored[f"{name}_scale_inv" if by_block else f"{name}_scale"] = scales
            numbers[name] = multiply(stored[name], scales, by_block)
    save_file(numbers, dense / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    fields = json.loads((dense / "config.json").read_text()) | {"quantization_config": FORMATS[scaling]}
    (packed / "config.json").write_text(json.dumps(fields))
    return packed, dense


def verify(model: Any, prompts: list[list[int]], received: list[Received]) -> None:
    """Tokens are greedy, and they and the prompt's have the log-probs that the model gives them."""
    for prompt, result in zip(prompts, received, strict=True):
        (sample,) = result.samples
        assert len(sample.token_ids) == NUM_TOKENS
        tokens, start = [*prompt, *sample.token_ids], len(prompt) - 1
        with torch.inference_mode():
            exact: Tensor = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        chosen = exact.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert float((exact.amax(-1) - chosen)[start:].max()) < NEAR
        assert result.prefilled is not None
        ours = np.concatenate([as_f32(result.prefilled.logprobs), np.asarray(sample.logprobs)])
        np.testing.assert_allclose(ours, chosen.numpy(), atol=NEAR)


@pytest.mark.parametrize("scaling", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_answers_as_transformers_does_with_dense_weights(tmp_path: Path, family: str, scaling: str) -> None:
    packed, dense = make_checkpoints(tmp_path, family, scaling)
    model: Any = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager")
    engine = Engine(packed, page_size=4, num_tokens=256, max_seqs=6, max_tokens=13)
    size = (dense / "model.safetensors").stat().st_size
    assert engine.runner.ready.ranks[0].weights < 0.5 * size  # they stay in 8 bits
    sampling = TokenSampling(temperature=0.0, num_logprobs=0, num_prompt_logprobs=0)
    verify(model, PROMPTS, engine.run(PROMPTS, sampling=sampling, max_tokens=NUM_TOKENS))
