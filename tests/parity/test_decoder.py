"""The decoder's logits equal transformers', for every family, over mixed steps of chunks and decoding rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from tests.cases.models import GEMMA4_SMALL, LLAMA3_ROPE, MXFP4, heads, make_checkpoint
from tests.drivers.paged_rows import PagedRow, run_rows
from toka_async.attention.kv_cache import make_caches
from toka_async.bar import show_nothing
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import ModelSpec, read_spec
from toka_async.model.weights import build_decoder, load_weights
from toka_async.startup.rank_attention import AttentionSetup, build_rank_attention

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FAST_YARN = YARN | {"truncate": False, "beta_fast": 16, "attention_factor": 1.3}
MIXED_LAYERS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
FACTORS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 7.0]}
LONG = {"type": "longrope", "original_max_position_embeddings": 16} | FACTORS
SHORT = {"type": "su", "original_max_position_embeddings": 512} | FACTORS
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-5-heads-tied": heads(5, 1, 40, head_dim=12, tie_word_embeddings=True),
    "llama-biases": {"attention_bias": True, "mlp_bias": True, "head_dim": ...},
    "llama-llama3": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0, "vocab_size": 277},
    "llama-linear": {"rope_scaling": {"type": "linear", "factor": 2.5}, "num_key_value_heads": ...},
    "llama-gelu": {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": None},
    "llama-new-spelling": {"rope_theta": ..., "rope_parameters": LLAMA3_ROPE | {"rope_theta": 5000.0}},
    "qwen2": {"head_dim": ...},
    "qwen2-7-heads-tied": heads(7, 1, 56, tie_word_embeddings=True),
    "qwen2-yarn": {"rope_scaling": YARN, "num_key_value_heads": 3},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1, "num_hidden_layers": 3},
    "qwen3": {"head_dim": 16},
    "qwen3-tied-biases": {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 6},
    "qwen3-yarn": {"rope_scaling": FAST_YARN, "vocab_size": 299},
    "qwen3-mixed-layers": heads(5, 1, 48, use_sliding_window=True, **MIXED_LAYERS),
    "mistral": {},
    "mistral-window": {"sliding_window": 9, "num_attention_heads": 6, "num_key_value_heads": 3},
    "mistral-mixed-layers": MIXED_LAYERS,
    "mistral-window-tied": {"sliding_window": 17, "head_dim": 20, "tie_word_embeddings": True},
    "qwen3_moe": {"norm_topk_prob": False},
    "qwen3_moe-mixed-layers-tied": {
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "tie_word_embeddings": True,
    },
    "qwen3_moe-one-expert-window": {"num_experts_per_tok": 1, "use_sliding_window": True, "sliding_window": 11},
    "qwen3_moe-all-experts-biases": {"num_experts_per_tok": 8, "attention_bias": True, "num_experts": 9},
    "mixtral": {},
    "mixtral-window-gelu": {"sliding_window": 9, "hidden_act": "gelu_pytorch_tanh", "num_local_experts": 5},
    "gpt_oss": {},
    "gpt_oss-full-layers": {"layer_types": ["full_attention"] * 2, "num_local_experts": 3, "num_key_value_heads": 6},
    "gpt_oss-default-rope": {"rope_scaling": ..., "rope_theta": ..., "max_position_embeddings": 4096},
    "olmo2": {},
    "olmo2-biases": {"attention_bias": True, "num_key_value_heads": 6},
    "olmo3": {},
    "olmoe": {"norm_topk_prob": True, "num_key_value_heads": 6},
    "exaone4": {},
    "exaone4-without-windows": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "qwen2_moe": {"mlp_only_layers": [2]},
    "olmo3-yarn": {"rope_scaling": YARN},
    "smollm3": {},
    "smollm3-window": {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [0, 1, 0]},
    "phi3": {},
    "phi3-short": {"rope_scaling": SHORT, "original_max_position_embeddings": 512},
    "phi3-long": {"rope_scaling": LONG, "original_max_position_embeddings": 16, "sliding_window": 13},
    "granite": {"tie_word_embeddings": True, "attention_bias": True},
    "glm": {},
    "glm4": {},
    "seed_oss": {"mlp_bias": True},
    "ernie4_5": {},
    "ernie4_5-untied-yarn": {"tie_word_embeddings": False, "rope_scaling": YARN},
    "helium": {"attention_bias": True, "mlp_bias": True},
    "ministral": {},
    "ministral3": {},
    "gemma": {},
    "gemma2": {},
    "vaultgemma": {},
    "gemma3_text": {},
    "gemma3_text-linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_local_base_freq": 5000.0},
    "gemma4_text": {},
    "gemma4_text-values": {"attention_k_eq_v": False, "final_logit_softcapping": None},
    "gemma4_text-small": GEMMA4_SMALL,
    "gemma4_text-inputs-alone": {"hidden_size_per_layer_input": 8, "num_global_key_value_heads": 2},
    "mistral-yarn": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, "num_attention_heads": 10},
}


def reference_model(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options)


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def run_ours(folder: Path, spec: ModelSpec, rows: list[PagedRow], page_size: int, dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    decoder = build_decoder(spec, dtype, device)
    load_weights(decoder, folder)
    num_pages = sum(-(-len(row.token_ids) // page_size) for row in rows)
    caches = make_caches(spec, num_pages, page_size, dtype, device)
    limits = RankLimits(max_seqs=len(rows), max_tokens=1000, max_context=1000)
    setup = AttentionSetup("reference", False, limits, None, with_flashinfer=False, show=show_nothing)
    attention = build_rank_attention(spec, caches, setup).backend
    pages = np.random.default_rng(1).permutation(num_pages).tolist()
    run_rows(decoder, attention, rows, page_size, iter(pages))


def random_rows(vocab_size: int) -> list[PagedRow]:
    rng = np.random.default_rng(3)
    shapes = ((1, 24), (7, 40), (33, 45), (50, 70), (20, 20))  # prompt, all tokens
    return [PagedRow(rng.integers(0, vocab_size, length).tolist(), prompt) for prompt, length in shapes]


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, case.partition("-")[0], **CASES[case])
    spec = read_spec(folder)
    model = reference_model(folder)
    expected = [reference_logits(model, row.token_ids) for row in random_rows(spec.vocab_size)]
    for page_size in (1, 16, 5):
        rows = random_rows(spec.vocab_size)
        run_ours(folder, spec, rows, page_size, torch.float32)
        for row, logits in zip(rows, expected, strict=True):
            torch.testing.assert_close(torch.cat(row.logits), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_saved_by_transformers(case: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "ours", case.partition("-")[0], **CASES[case])
    reference_model(folder).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    spec = read_spec(tmp_path / "theirs")
    assert spec == read_spec(folder)
    ours, theirs = random_rows(spec.vocab_size)[:2], random_rows(spec.vocab_size)[:2]
    run_ours(folder, spec, ours, 16, torch.float32)
    run_ours(tmp_path / "theirs", spec, theirs, 16, torch.float32)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.cat(a.logits), torch.cat(b.logits), atol=0, rtol=0)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """The logits are those of the model that the 4-bit weights stand for, by transformers' reading of them."""
    folder = make_checkpoint(tmp_path, "gpt_oss", quantization_config=MXFP4)
    model = reference_model(folder, quantization_config=Mxfp4Config(dequantize=True))
    spec, rows = read_spec(folder), random_rows(261)[:3]
    run_ours(folder, spec, rows, 16, torch.float32)
    for row in rows:
        torch.testing.assert_close(torch.cat(row.logits), reference_logits(model, row.token_ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama-llama3", "qwen3-mixed-layers", "mistral-window"])
def test_half_precision(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, case.partition("-")[0], **CASES[case])
    spec = read_spec(folder)
    rows = random_rows(spec.vocab_size)
    run_ours(folder, spec, rows, 16, dtype)
    model = reference_model(folder)
    for row in rows:
        ours, exact = torch.cat(row.logits), reference_logits(model, row.token_ids)
        assert ours.dtype == dtype
        error = (ours.float() - exact).norm() / exact.norm()
        assert error < 0.03
