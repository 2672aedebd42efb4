"""Tiny random checkpoints of models that only transformers computes, as that library writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.cases.models import END_ID, write_tokenizer

BASE: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": END_ID,
}
# Fields of others; None: a family has no such field.
FIELDS: dict[str, dict[str, Any]] = {
    "starcoder2": {"sliding_window": 20},
    "stablelm": {"use_parallel_residual": True},
    "gpt_neox": {"num_key_value_heads": None},
    "persimmon": {"num_key_value_heads": None},
    "gpt2": {
        "num_key_value_heads": None,
        "intermediate_size": None,
        "n_inner": 72,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "opt": {"num_key_value_heads": None, "intermediate_size": None, "ffn_dim": 72, "word_embed_proj_dim": 48},
    "nemotron": {"head_dim": 8},
    "gpt_oss": {"head_dim": 8, "sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma2": {"head_dim": 8, "sliding_window": 20, "attn_logit_softcapping": 2.0},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "deepseek_v3": {
        "num_key_value_heads": 6,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
NULLABLE = ("bos_token_id", "pad_token_id")


def make_foreign(folder: Path, model_type: str, seed: int = 0, **fields: Any) -> Path:
    """Writes config.json, model.safetensors and a tokenizer; activations keep their size. Returns `folder`."""
    asked = BASE | FIELDS.get(model_type, {}) | fields
    config = AutoConfig.for_model(
        model_type, **{name: value for name, value in asked.items() if value is not None or name in NULLABLE}
    )
    generator = torch.Generator().manual_seed(seed)
    build: Any = AutoModelForCausalLM.from_config
    model = build(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for values in model.parameters():
            noise = torch.randn(values.shape, generator=generator)
            values.copy_(noise * values.shape[-1] ** -0.5 if values.dim() > 1 else values + 0.1 * noise)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
