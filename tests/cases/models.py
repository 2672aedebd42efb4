"""Tiny random checkpoints of every family, with a byte-level tokenizer, in the layout of the Hugging Face hub.

Made without transformers, in milliseconds; transformers reads them as it reads real ones.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIALS = ("<|end|>", "<|start|>")
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 32}
GROWING_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
GROWING_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
END_ID = 256  # <|end|>; ids below are the bytes
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

_BASE: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": END_ID,
}
_ARCHITECTURES = {
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "helium": "HeliumForCausalLM",
}
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # some of their layers are recurrent
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_SHARED = {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 24}
_SEEING = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}


_OWN_FIELDS: dict[str, dict[str, Any]] = {
    "olmo2": {"head_dim": ...},
    "olmoe": {"head_dim": ...},
    "exaone4": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
    },
    "qwen2_moe": {"head_dim": ..., "decoder_sparse_step": 2, "num_hidden_layers": 3},
    "olmo3": {"head_dim": ..., "sliding_window": 9, "num_hidden_layers": 4, "rope_theta": 500000.0},
    "smollm3": {"head_dim": ..., "pad_token_id": 0, "num_hidden_layers": 3, "no_rope_layer_interval": 2},
    "phi3": {"head_dim": ..., "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "granite": {
        "head_dim": ...,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    },
    "glm": {"attention_bias": True, "pad_token_id": 0},
    "glm4": {"attention_bias": True, "pad_token_id": 0},
    "seed_oss": {"attention_bias": True},
    "ernie4_5": {"tie_word_embeddings": True},
    "ministral": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "ministral3": {"rope_theta": ..., "rope_parameters": GROWING_YARN},
    "gemma": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 9,
        "query_pre_attn_scalar": 12,
    },
    "gemma3_text": {
        "tie_word_embeddings": True,
        "sliding_window": 9,
        "sliding_window_pattern": 3,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 12,
        "rope_theta": ...,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma4_text": {
        "tie_word_embeddings": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 5.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 261,
        "rope_theta": ...,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "mistral3": {"sliding_window": None},
}
# Like Gemma 4's small models: the last layers read the keys of the last before them, and all have inputs of their own.
GEMMA4_SMALL: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 6,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
}
_OWN_FIELDS["vaultgemma"] = _OWN_FIELDS["gemma2"]
_OWN_FIELDS["gemma3"] = _OWN_FIELDS["gemma3_text"]
_OWN_FIELDS |= dict.fromkeys((*HYBRIDS, "qwen3_5"), _HYBRID)
# Families whose checkpoints have a text part: what it is, and fields of the whole.
TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": ("mistral", {"spatial_merge_size": 2, "image_token_index": 10}),
    "gemma3": ("gemma3_text", {"mm_tokens_per_image": 4, "image_token_index": 10}),
    "qwen3_5": ("qwen3_5_text", {"vision_config": _SEEING}),
}
_NORMS = {
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "olmo3": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "exaone4": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "glm4": (
        *("input_layernorm", "post_attention_layernorm"),
        *("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "gemma2": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}
_NORMS["vaultgemma"] = ("input_layernorm", "pre_feedforward_layernorm")
_NORMS["gemma3_text"] = _NORMS["gemma4_text"] = _NORMS["gemma2"]
_ADDS_ONE = ("gemma", "gemma2", "vaultgemma", "gemma3_text", *HYBRIDS)  # their norms' weights are about 0

_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True},
    "qwen2_moe": _SHARED | {"num_experts": 6, "num_experts_per_tok": 3},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 20},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40},
    "qwen3_next": _SHARED | {"num_experts": 8, "num_experts_per_tok": 3},
    "qwen3_5_moe_text": _SHARED | {"num_experts": 6, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "hidden_size": 64,
        "attention_bias": True,
        "sliding_window": 9,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
    },
}


_VISION = {"model_type": "pixtral", "hidden_size": 8, "num_hidden_layers": 0, "num_attention_heads": 2, "head_dim": 4}


def heads(num_heads: int, num_kv_heads: int, hidden_size: int, **others: Any) -> dict[str, Any]:
    """Fields of config.json."""
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "hidden_size": hidden_size}
    return sizes | others


def make_checkpoint(folder: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """Writes config.json, model.safetensors and a tokenizer; `overrides` are fields of config.json.

    An override of the value `...` leaves the field out. Returns `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = _BASE | _EXPERTS.get(family, {}) | _OWN_FIELDS.get(family, {})
    config |= {"model_type": family, "architectures": [_ARCHITECTURES[family]]} | overrides
    if family == "mistral":
        config.setdefault("sliding_window", None)
    config = {name: value for name, value in config.items() if value is not ...}
    if family in TEXT_PARTS:
        _write_text_part(folder, config, seed)
    else:
        (folder / "config.json").write_text(json.dumps(config))
        tensors = random_tensors(config, seed)
        if config.get("quantization_config") == MXFP4:
            tensors = {packed: values for name, each in tensors.items() for packed, values in pack_mxfp4(name, each)}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder)
    return folder


def _write_text_part(folder: Path, config: dict[str, Any], seed: int) -> None:
    """A model that also sees, in the layout of published ones; its vision part is one tensor."""
    kind, fields = TEXT_PARTS[config["model_type"]]
    text = config | {"model_type": kind}
    of_whole = ("architectures", "model_type", "torch_dtype", "eos_token_id", "bos_token_id", "tie_word_embeddings")
    whole = {name: config[name] for name in of_whole} | {"text_config": text, "vision_config": _VISION} | fields
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {f"language_model.{name}": tensor for name, tensor in random_tensors(text, seed).items()}
    tensors["vision_tower.patch_conv.weight"] = torch.zeros(8, 3, 4, 4)
    if kind in HYBRIDS:
        tensors = {re.sub(r"^language_model\.model\.", "model.language_model.", n): t for n, t in tensors.items()}
        tensors = {n.removeprefix("language_model."): t for n, t in tensors.items() if "vision" not in n}
        tensors["model.visual.merger.norm.bias"] = torch.zeros(16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """The tensors of a checkpoint by their names; scaled so that activations keep their size."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])

    def normal(shape: tuple[int, ...], name: str) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) == 2 or name.endswith("conv1d.weight") else 0.2
        return (torch.randn(shape, generator=generator) * scale + (1.0 if len(shape) == 1 else 0.0)).to(dtype)

    tensors = {name: normal(shape, name) for name, shape in _shapes(config).items()}
    for name, tensor in tensors.items():
        if config["model_type"] in _ADDS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
            tensor -= 1
        if name.endswith("A_log"):  # states keep much of their past
            tensor -= 4
        elif name.endswith("gate_up_proj_bias"):
            tensor *= 20  # so that some gates are clamped
        elif name.endswith("sinks"):
            tensor *= 3
    tensors["model.embed_tokens.weight"] = torch.randn(
        (config["vocab_size"], config["hidden_size"]), generator=generator
    ).to(dtype)
    return tensors


def pack_mxfp4(name: str, values: Tensor) -> list[tuple[str, Tensor]]:
    """Rounds experts' matrices [experts, inputs, outputs] to MXFP4, by their names in a checkpoint; others stay."""
    if values.ndim != 3:
        return [(name, values)]
    groups = values.float().transpose(1, 2).reshape(len(values), values.shape[2], -1, 32)
    exponents = groups.abs().amax(3).log2().floor().int() - 2  # the largest value is of 4 to 8, of which 6 is left
    each = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = torch.ldexp(groups, -exponents[..., None])
    codes = (scaled.abs()[..., None] - each).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return [(f"{name}_blocks", blocks.to(torch.uint8)), (f"{name}_scales", (exponents + 127).to(torch.uint8))]


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    per_layer = config.get("hidden_size_per_layer_input", 0)
    if per_layer:
        total = config["num_hidden_layers"] * per_layer
        shapes["model.embed_tokens_per_layer.weight"] = (vocab, total)
        shapes["model.per_layer_model_projection.weight"] = (total, hidden)
        shapes["model.per_layer_projection_norm.weight"] = (per_layer,)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        own = config
        reads = layer >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
        inner = config["intermediate_size"] * (1 + (reads and config.get("use_double_wide_mlp", False)))
        if config["model_type"] == "gemma4_text" and config["layer_types"][layer] == "full_attention":
            own = config | {"head_dim": config["global_head_dim"]}
            if config["attention_k_eq_v"]:
                own["num_key_value_heads"] = config["num_global_key_value_heads"]
        mixer = _recurrent_shapes if _is_recurrent(config, layer) else _attention_shapes
        shapes |= {f"{prefix}.{name}": shape for name, shape in mixer(own, hidden).items()}
        if config["model_type"] == "gemma4_text":
            shapes[f"{prefix}.layer_scalar"] = (1,)
            if own is not config and config["attention_k_eq_v"]:
                del shapes[f"{prefix}.self_attn.v_proj.weight"]
            if reads and layer % 2 == 0:  # published checkpoints have tensors that nothing reads
                for name in ("k_proj", "v_proj", "k_norm"):
                    del shapes[f"{prefix}.self_attn.{name}.weight"]
            if per_layer:
                shapes[f"{prefix}.per_layer_input_gate.weight"] = (per_layer, hidden)
                shapes[f"{prefix}.per_layer_projection.weight"] = (hidden, per_layer)
                shapes[f"{prefix}.post_per_layer_input_norm.weight"] = (hidden,)
        if has_experts(config, layer):
            shapes |= {f"{prefix}.{name}": shape for name, shape in _expert_shapes(config, hidden).items()}
        else:
            outer = [("gate", (inner, hidden)), ("up", (inner, hidden))]
            if config["model_type"] in ("phi3", "glm", "glm4"):
                outer = [("gate_up", (2 * inner, hidden))]
            for name, shape in (*outer, ("down", (hidden, inner))):
                shapes[f"{prefix}.mlp.{name}_proj.weight"] = shape
                if config.get("mlp_bias"):
                    shapes[f"{prefix}.mlp.{name}_proj.bias"] = shape[:1]
        for name in _NORMS.get(config["model_type"], ("input_layernorm", "post_attention_layernorm")):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
    return shapes


def has_experts(config: dict[str, Any], layer: int) -> bool:
    """Tells whether a layer of a configuration of `make_checkpoint` has experts."""
    if config["model_type"] in ("mixtral", "gpt_oss", "qwen3_5_moe_text", "olmoe"):
        return True
    is_sparse = (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    return (
        config["model_type"] in ("qwen2_moe", "qwen3_moe", "qwen3_next")
        and is_sparse
        and layer not in config.get("mlp_only_layers", ())
    )


def _expert_shapes(config: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    if config["model_type"] == "gpt_oss":
        count, inner = config["num_local_experts"], config["intermediate_size"]
        return {
            "mlp.router.weight": (count, hidden),
            "mlp.router.bias": (count,),
            "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
            "mlp.experts.down_proj": (count, inner, hidden),
            "mlp.experts.down_proj_bias": (count, hidden),
        }
    if config["model_type"] == "mixtral":
        count, inner, prefix = config["num_local_experts"], config["intermediate_size"], "block_sparse_moe"
        names = ("w1", "w3", "w2")
    else:
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        count, prefix = config["num_experts"], "mlp"
        names = ("gate_proj", "up_proj", "down_proj")
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (count, hidden)}
    for number in range(count):
        for name, shape in zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
            shapes[f"{prefix}.experts.{number}.{name}.weight"] = shape
    if shared := config.get("shared_expert_intermediate_size"):
        shapes[f"{prefix}.shared_expert_gate.weight"] = (1, hidden)
        for name, shape in zip(names, ((shared, hidden), (shared, hidden), (hidden, shared)), strict=True):
            shapes[f"{prefix}.shared_expert.{name}.weight"] = shape
    return shapes


def _is_recurrent(config: dict[str, Any], layer: int) -> bool:
    return config["model_type"] in HYBRIDS and (layer + 1) % config["full_attention_interval"] > 0


def _recurrent_shapes(config: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    heads, dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * dim
    if config["model_type"] == "qwen3_next":
        projections = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
    else:
        projections = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size, hidden) for name, size in projections.items()}
    shapes |= {"conv1d.weight": (2 * keys + values, 1, 4), "A_log": (heads,), "dt_bias": (heads,)}
    shapes |= {"norm.weight": (dim,), "out_proj.weight": (hidden, values)}
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _attention_shapes(config: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    family, heads = config["model_type"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    wide, narrow = heads * dim, (config.get("num_key_value_heads") or heads) * dim
    shapes: dict[str, tuple[int, ...]] = {}
    queries = 2 * wide if family in HYBRIDS else wide  # and their gates
    inputs = [("q", (queries, hidden)), ("k", (narrow, hidden)), ("v", (narrow, hidden))]
    if family == "phi3":
        inputs = [("qkv", (wide + 2 * narrow, hidden))]
    for name, shape in (*inputs, ("o", (hidden, wide))):
        shapes[f"self_attn.{name}_proj.weight"] = shape
        has_bias = config.get("attention_bias") and (name != "o" or family not in ("glm", "glm4", "seed_oss", "helium"))
        if has_bias or (family in ("qwen2", "qwen2_moe") and name != "o"):
            shapes[f"self_attn.{name}_proj.bias"] = shape[:1]
    if family == "gpt_oss":
        shapes["self_attn.sinks"] = (heads,)
    if family in ("qwen3", "qwen3_moe", "gemma3_text", "gemma4_text", "exaone4", *HYBRIDS):
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    if family in ("olmo2", "olmo3", "olmoe"):
        shapes |= {"self_attn.q_norm.weight": (wide,), "self_attn.k_norm.weight": (narrow,)}
    return shapes


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """A byte-level tokenizer: ids 0-255 are the bytes in value order, then the special tokens."""
    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
