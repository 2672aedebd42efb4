"""Fields that a `config.json` leaves out get the values that transformers' configuration classes give them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.cases.models import HYBRIDS
from toka_async.checkpoint.experts_spec import ExpertsFeedSpec
from toka_async.checkpoint.families import FAMILIES
from toka_async.checkpoint.layer_spec import DenseFeedSpec
from toka_async.checkpoint.spec import ModelSpec, read_spec

REQUIRED = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}
# Fields without which transformers cannot make a family's model, or has heads that the sizes above do not fit.
NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "ministral": {"head_dim": 8},
    "helium": {"num_attention_heads": 20, "hidden_size": 2560},
}
OLDER = ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral", "qwen2_moe", "olmoe"]


@pytest.mark.parametrize("family", OLDER)
@pytest.mark.parametrize("fields", [{}, {"rope_theta": 7000.0}, {"rope_scaling": {"type": "linear", "factor": 2.0}}])
def test_absent_fields(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REQUIRED | {"model_type": family} | fields))
    spec, config = read_spec(tmp_path), AutoConfig.from_pretrained(tmp_path)
    from_config: Callable[[object], Any] = AutoModelForCausalLM.from_config
    layer = from_config(config).model.layers[0]
    attention = layer.self_attn
    assert spec.attention.num_kv_heads == config.num_key_value_heads
    assert spec.attention.head_dim == attention.head_dim
    assert spec.norm.eps == config.rms_norm_eps
    assert spec.tie_embeddings == config.tie_word_embeddings
    assert spec.attention.bias == (attention.q_proj.bias is not None)
    assert spec.attention.output_bias == (attention.o_proj.bias is not None)
    feed = spec.layers[0].feed
    assert isinstance(feed, DenseFeedSpec | ExpertsFeedSpec)
    assert feed.activation == config.hidden_act
    if isinstance(feed, DenseFeedSpec):
        assert feed.bias == (layer.mlp.up_proj.bias is not None)
    else:
        assert (feed.num_experts, 2 * feed.inner) == layer.mlp.experts.gate_up_proj.shape[:2]
        assert feed.top_k == layer.mlp.gate.top_k
        assert feed.renormalizes == getattr(layer.mlp.gate, "norm_topk_prob", True)
    assert (spec.attention.head_norm is not None) == hasattr(attention, "q_norm")
    assert set(spec.windows) == {getattr(config, "sliding_window", None) or 0}
    assert spec.max_context == config.max_position_embeddings * spec.ropes[0].factor
    assert (spec.ropes[0].theta, spec.ropes[0].kind) == (
        config.rope_parameters["rope_theta"],
        config.rope_parameters["rope_type"],
    )
    check_ends(spec, config)


def check_ends(spec: ModelSpec, config: Any) -> None:
    eos = config.eos_token_id
    assert spec.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    assert spec.bos_token_id == config.bos_token_id


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*OLDER, *HYBRIDS, "gpt_oss"}))
def test_families_of_other_layers(tmp_path: Path, family: str) -> None:
    fields = REQUIRED | {"model_type": family, "num_hidden_layers": 4, "pad_token_id": 0} | NEEDED.get(family, {})
    (tmp_path / "config.json").write_text(json.dumps(fields))
    spec, config = read_spec(tmp_path), AutoConfig.from_pretrained(tmp_path)
    from_config: Callable[[object], Any] = AutoModelForCausalLM.from_config
    with torch.device("meta"):  # sizes as published ones cost nothing
        model = from_config(config)
    layers, eps = model.model.layers, config.rms_norm_eps
    assert (spec.norm.eps, spec.tie_embeddings) == (eps, config.tie_word_embeddings)
    check_ends(spec, config)
    for number, (layer, ours, attention) in enumerate(zip(layers, spec.layers, spec.attentions, strict=True)):
        feed = ours.feed
        assert isinstance(feed, DenseFeedSpec)
        assert attention.head_dim == layer.self_attn.head_dim
        assert attention.num_kv_heads == config.num_key_value_heads
        assert attention.score_scale == pytest.approx(layer.self_attn.scaling)
        window = getattr(layer.self_attn, "sliding_window", None) or 0
        assert attention.window == (window if getattr(layer.self_attn, "is_sliding", True) else 0)
        matrices = {name: matrix for matrix in spec.list_matrices(number) for name in matrix.names}
        for name, matrix in matrices.items():
            linear = layer.get_submodule(name)
            assert matrix.bias == (linear.bias is not None)
            assert matrix.num_inputs == linear.in_features
        norms = {ours.norms.before_mixer, ours.norms.after_mixer, ours.norms.before_feed, ours.norms.after_feed} - {""}
        assert norms == {name for name, _ in layer.named_children() if "layernorm" in name}
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        assert feed.activation == activation
        assert (attention.head_norm is not None) == hasattr(layer.self_attn, "q_norm")
    ropes = config.rope_parameters
    for attention in spec.attentions:
        kind = "sliding_attention" if attention.window else "full_attention"
        expected = ropes.get(kind, ropes)["rope_theta"]
        assert attention.rope is None or attention.rope.theta == expected


@pytest.mark.parametrize("num_layers", [1, 4])
def test_absent_fields_of_gpt_oss(tmp_path: Path, num_layers: int) -> None:
    """Windows in turns, and positions stretched."""
    fields = {"model_type": "gpt_oss", "num_hidden_layers": num_layers}
    (tmp_path / "config.json").write_text(json.dumps(REQUIRED | fields))
    spec, config = read_spec(tmp_path), AutoConfig.from_pretrained(tmp_path)
    kinds = {"sliding_attention": config.sliding_window, "full_attention": 0}
    assert spec.windows == tuple(kinds[kind] for kind in config.layer_types)
    attention, feed, rope = spec.attention, spec.layers[0].feed, config.rope_parameters
    assert isinstance(feed, ExpertsFeedSpec)
    assert (attention.num_kv_heads, attention.head_dim) == (config.num_key_value_heads, config.head_dim)
    assert (attention.sinks, attention.bias, attention.output_bias) == (True, config.attention_bias, True)
    assert (feed.num_experts, feed.top_k, feed.inner) == (config.num_local_experts, config.num_experts_per_tok, 32)
    assert (spec.norm.eps, spec.max_context) == (config.rms_norm_eps, config.max_position_embeddings)
    (ours,) = spec.ropes
    expected = {"kind": rope["rope_type"], "original_max_position": rope["original_max_position_embeddings"]}
    expected |= {"theta": rope["rope_theta"], "factor": rope["factor"], "truncate": rope["truncate"]}
    assert {name: getattr(ours, name) for name in expected} == expected
    check_ends(spec, config)


@pytest.mark.parametrize("family", HYBRIDS)
def test_families_with_recurrent_layers(tmp_path: Path, family: str) -> None:
    """Their own defaults; two layers of four are small enough to be made."""
    fields = REQUIRED | {"num_hidden_layers": 4, "model_type": family, "num_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    spec, config = read_spec(tmp_path), AutoConfig.from_pretrained(tmp_path)
    from_config: Callable[[object], Any] = AutoModelForCausalLM.from_config
    layers = from_config(config).model.layers
    check_ends(spec, config)
    assert spec.norm.eps == config.rms_norm_eps
    assert len(spec.recurrences) == 3
    recurrence, linear = spec.recurrences[0], layers[0].linear_attn
    assert (recurrence.num_key_heads, recurrence.num_value_heads) == (linear.num_k_heads, linear.num_v_heads)
    assert (recurrence.key_dim, recurrence.value_dim) == (linear.head_k_dim, linear.head_v_dim)
    assert (recurrence.width, recurrence.num_channels) == (linear.conv_kernel_size, linear.conv_dim)
    assert spec.attention.head_dim == config.head_dim
    assert spec.attention.num_kv_heads == config.num_key_value_heads
    assert spec.ropes[0].part == config.rope_parameters["partial_rotary_factor"]
    for number, layer in enumerate(layers):
        for matrix in spec.layers[number].list_mixer_matrices(spec.hidden_size):
            assert sum(layer.get_submodule(name).out_features for name in {*matrix.names}) == matrix.num_outputs
