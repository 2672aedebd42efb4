from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cases.models import LLAMA3_ROPE, make_checkpoint
from tests.cases.quantized import BLOCKS
from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.experts_spec import ExpertNames, ExpertsFeedSpec
from toka_async.checkpoint.layer_spec import DenseFeedSpec, LayerSpec, NormSpec
from toka_async.checkpoint.spec import ModelError, ModelSpec, RopeSpec, read_spec

MINIMAL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}


def read(folder: Path, **fields: Any) -> ModelSpec:
    config = {name: value for name, value in (MINIMAL | fields).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


def test_minimal_llama(tmp_path: Path) -> None:
    attention = AttentionSpec(num_heads=6, num_kv_heads=6, head_dim=8, rope=RopeSpec(theta=10000.0))
    assert read(tmp_path) == ModelSpec(
        family="llama",
        vocab_size=100,
        hidden_size=48,
        norm=NormSpec(eps=1e-6),
        tie_embeddings=False,
        layers=(LayerSpec(attention, DenseFeedSpec(inner=64, activation="silu", bias=False)),) * 3,
        max_context=2048,
        dtype="float32",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


FACTORS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 7.0], "original_max_position_embeddings": 64}
LONG_ROPE: dict[str, Any] = {"model_type": "phi3", "rope_scaling": FACTORS | {"type": "su"}}
GEMMA4: dict[str, Any] = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "num_key_value_heads": 2}
GEMMA4 |= {"head_dim": 16}
YARN_BY_POSITION = {"type": "yarn", "factor": 16.0, "llama_4_scaling_beta": 0.1}
GPT_OSS = {"model_type": "gpt_oss", "num_key_value_heads": 2}
MOE: dict[str, Any] = MINIMAL | {"model_type": "qwen3_moe", "num_key_value_heads": 2, "num_hidden_layers": 6}


def read_experts(folder: Path, **fields: Any) -> list[int]:
    """The number of experts of each layer; 0: a dense one."""
    feeds = [layer.feed for layer in read(folder, **(MOE | fields)).layers]
    return [feed.num_experts if isinstance(feed, ExpertsFeedSpec) else 0 for feed in feeds]


def test_which_layers_have_experts(tmp_path: Path) -> None:
    assert read_experts(tmp_path) == [128] * 6
    assert read_experts(tmp_path, num_experts=60, intermediate_size=...) == [60] * 6
    assert read_experts(tmp_path, decoder_sparse_step=2) == [0, 128] * 3
    assert read_experts(tmp_path, decoder_sparse_step=2, mlp_only_layers=[1, 4]) == [0, 0, 0, 128, 0, 128]
    assert read_experts(tmp_path, mlp_only_layers=None) == [128] * 6
    assert read_experts(tmp_path, num_experts=0) == [0] * 6
    assert read_experts(tmp_path, model_type="mixtral", num_local_experts=5, decoder_sparse_step=9) == [5] * 6


def test_experts_of_both_families(tmp_path: Path) -> None:
    (feed,) = {layer.feed for layer in read(tmp_path, **MOE, num_local_experts=9, norm_topk_prob=True).layers}
    assert feed == ExpertsFeedSpec(
        inner=768, activation="silu", num_experts=9, top_k=8, renormalizes=True, names=ExpertNames()
    )
    spec = read(tmp_path, **(MOE | {"model_type": "mixtral", "hidden_act": "gelu"}))
    (feed,) = {layer.feed for layer in spec.layers}
    names = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
    assert feed == ExpertsFeedSpec(inner=64, activation="gelu", num_experts=8, top_k=2, renormalizes=True, names=names)
    assert (set(spec.windows), spec.norm.eps, spec.ropes[0].theta) == ({0}, 1e-5, 1e6)


def test_biases(tmp_path: Path) -> None:
    def biases(**fields: Any) -> tuple[bool, bool, bool]:
        spec = read(tmp_path, **fields)
        feed = spec.layers[0].feed
        assert isinstance(feed, DenseFeedSpec)
        return spec.attention.bias, spec.attention.output_bias, feed.bias

    assert biases() == (False, False, False)
    assert biases(attention_bias=True) == (True, True, False)
    assert biases(mlp_bias=True) == (False, False, True)
    assert biases(model_type="qwen2") == (True, False, False)
    assert biases(model_type="qwen3", attention_bias=True) == (True, True, False)
    assert biases(model_type="mistral") == (False, False, False)


def test_heads(tmp_path: Path) -> None:
    def heads(**fields: Any) -> tuple[int, int, int]:
        spec = read(tmp_path, **fields)
        return spec.attention.num_heads, spec.attention.num_kv_heads, spec.attention.head_dim

    assert heads() == (6, 6, 8)
    assert heads(num_key_value_heads=2, head_dim=20) == (6, 2, 20)
    assert heads(num_key_value_heads=None, head_dim=None) == (6, 6, 8)
    assert heads(model_type="qwen3") == (6, 6, 128)
    assert heads(model_type="qwen3", head_dim=None) == (6, 6, 8)
    assert heads(model_type="qwen2", num_attention_heads=64, hidden_size=128) == (64, 32, 2)
    assert heads(model_type="mistral", num_attention_heads=24) == (24, 8, 2)
    assert heads(num_attention_heads=5, head_dim=10) == (5, 5, 10)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_by_layer(tmp_path: Path, family: str) -> None:
    def windows(**fields: Any) -> tuple[int, ...]:
        return read(tmp_path, model_type=family, **fields).windows

    assert windows(sliding_window=5, max_window_layers=1) == (0, 0, 0)
    assert windows(use_sliding_window=True, sliding_window=5, max_window_layers=1) == (0, 5, 5)
    assert windows(use_sliding_window=True, max_window_layers=0) == (4096, 4096, 4096)
    assert windows(use_sliding_window=True, sliding_window=5) == (0, 0, 0)
    assert windows(use_sliding_window=True, sliding_window=None, max_window_layers=0) == (0, 0, 0)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(use_sliding_window=True, sliding_window=5, layer_types=kinds) == (5, 0, 5)
    assert windows(layer_types=["full_attention"] * 3) == (0, 0, 0)


def test_mistral_windows(tmp_path: Path) -> None:
    assert read(tmp_path, model_type="mistral").windows == (4096,) * 3
    assert read(tmp_path, model_type="mistral", sliding_window=None).windows == (0,) * 3
    assert read(tmp_path, model_type="mistral", sliding_window=7).windows == (7,) * 3
    assert read(tmp_path, sliding_window=7).windows == (0,) * 3  # llama has none


def test_mistral_with_kinds_of_layers_is_ministral(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    spec = read(tmp_path, model_type="mistral", sliding_window=7, layer_types=kinds)
    assert (spec.family, spec.windows) == ("ministral", (0, 7, 0))
    assert read(tmp_path, model_type="mistral", sliding_window=7, layer_types=None).family == "mistral"


def test_both_spellings(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3_ROPE, torch_dtype="bfloat16", max_position_embeddings=256)
    both = LLAMA3_ROPE | {"rope_theta": 5e5}
    new = read(tmp_path, rope_parameters=both, dtype="bfloat16", max_position_embeddings=256)
    assert old == new
    assert old.dtype == "bfloat16"
    assert old.ropes[0] == RopeSpec(
        theta=5e5, kind="llama3", factor=8.0, original_max_position=32, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert old.max_context == 256
    assert read(tmp_path, rope_scaling={"type": "default"}, rope_theta=3.0).ropes[0] == RopeSpec(theta=3.0)
    assert read(tmp_path, rope_scaling=None, rope_theta=3).ropes[0] == RopeSpec(theta=3.0)
    assert read(tmp_path, dtype="float16", torch_dtype="bfloat16").dtype == "float16"
    assert read(tmp_path, torch_dtype="torch.float16").dtype == "float16"


def test_without_a_dtype_mxfp4_is_what_it_stands_for(tmp_path: Path) -> None:
    assert read(tmp_path).dtype == "float32"
    assert read(tmp_path, quantization_config={"quant_method": "mxfp4"}).dtype == "bfloat16"


def test_stretched_contexts(tmp_path: Path) -> None:
    linear = read(tmp_path, rope_scaling={"type": "linear", "factor": 4.0}, max_position_embeddings=100)
    assert (linear.ropes[0], linear.max_context) == (RopeSpec(kind="linear", factor=4.0), 400)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read(tmp_path, rope_scaling=yarn, max_position_embeddings=64).max_context == 256
    assert read(tmp_path, rope_scaling=yarn, max_position_embeddings=80).max_context == 256
    assert read(tmp_path, rope_scaling=yarn, max_position_embeddings=300).max_context == 300
    absent = read(tmp_path, rope_scaling={"type": "yarn", "factor": 2.0}, max_position_embeddings=50)
    assert (absent.ropes[0].original_max_position, absent.max_context) == (50, 100)
    for scaling in ({"type": "linear", "factor": 1e308}, yarn | {"factor": 1e308}):
        assert read(tmp_path, rope_scaling=scaling).max_context == 2**31 - 1
    outside = read(tmp_path, rope_scaling=yarn, original_max_position_embeddings=32)
    assert outside.ropes[0].original_max_position == 32


def test_the_frequencies_of_longrope_are_those_of_the_context(tmp_path: Path) -> None:
    for max_positions, is_long in ((64, False), (65, True)):
        rope = read(tmp_path, **LONG_ROPE, head_dim=4, max_position_embeddings=max_positions).ropes[0]
        assert (rope.kind, rope.is_long) == ("longrope", is_long)
        assert rope.factor == max_positions / 64
    spec = read(tmp_path, **LONG_ROPE, head_dim=4, max_position_embeddings=65)
    assert [spec.fit_context(context).ropes[0].is_long for context in (64, 65)] == [False, True]


def test_layers_differ_in_window_and_rope(tmp_path: Path) -> None:
    spec = read(tmp_path, model_type="gemma3_text", num_hidden_layers=7, sliding_window=9)
    assert spec.windows == (9, 9, 9, 9, 9, 0, 9)
    assert [each.rope.theta for each in spec.attentions if each.rope] == [1e4] * 5 + [1e6, 1e4]
    linear = {"rope_type": "linear", "factor": 8.0}
    stretched = read(tmp_path, model_type="gemma3_text", num_hidden_layers=7, rope_scaling=linear)
    assert stretched.max_context == spec.max_context  # which says what it has with that
    spec = read(tmp_path, model_type="smollm3", num_hidden_layers=5)
    assert [each.rope is None for each in spec.attentions] == [False, False, False, True, False]
    named = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 7.0}}
    spec = read(tmp_path, model_type="olmo3", num_hidden_layers=4, rope_parameters=named)
    assert [each.rope.theta for each in spec.attentions if each.rope] == [7.0, 7.0, 7.0, 5.0]
    flat = {"rope_type": "default", "rope_theta": 9.0}  # transformers writes these too where they were given so
    assert read(tmp_path, model_type="olmo3", num_hidden_layers=4, rope_parameters=named | flat) == spec
    assert read(tmp_path, model_type="ministral", sliding_window=None).windows == (0, 0, 0)


def test_layers_differ_in_their_heads(tmp_path: Path) -> None:
    spec = read(tmp_path, **GEMMA4, num_hidden_layers=7, global_head_dim=32, attention_k_eq_v=True)
    local, whole = spec.attention_kinds
    assert list(spec.attention_kinds.values()) == [(0, 1, 2, 3, 4), (5, 6)]
    assert [(kind.num_kv_heads, kind.head_dim) for kind in (local, whole)] == [(2, 16), (2, 32)]
    assert [each.values_are_keys for each in spec.attentions] == [False] * 5 + [True] * 2
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.k_proj")
    assert spec.attentions[5].list_matrices(48, "dense")[0].names == names
    rope = spec.attentions[5].rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.count_turned(32), rope.order_head(32)) == ("proportional", 1e6, 8, ())
    saved = {"per_layer_config": {"5": {"head_dim": 64, "num_key_value_heads": 1}}}
    spec = read(tmp_path, **GEMMA4, num_hidden_layers=7, **saved)
    assert (spec.attentions[5].head_dim, spec.attentions[5].num_kv_heads) == (64, 1)
    assert not any(spec.attentions[layer].head_dim == 64 for layer in range(5))


def test_scales_and_soft_caps(tmp_path: Path) -> None:
    spec = read(tmp_path, model_type="gemma2", query_pre_attn_scalar=16)
    assert (spec.embedding_scale, spec.attention.score_scale) == (48**0.5, 0.25)
    assert (spec.attention.soft_cap, spec.logits_soft_cap) == (50.0, 30.0)
    spec = read(tmp_path, model_type="gemma2", attn_logit_softcapping=None, final_logit_softcapping=7.0)
    assert (spec.attention.soft_cap, spec.logits_soft_cap) == (0.0, 7.0)
    spec = read(tmp_path, model_type="gemma3_text", attn_logit_softcapping=5.0, final_logit_softcapping=7.0)
    assert (spec.attention.soft_cap, spec.logits_soft_cap) == (0.0, 7.0)  # its code has none for scores
    fields = {"embedding_multiplier": 12.0, "residual_multiplier": 0.2, "attention_multiplier": 0.5}
    spec = read(tmp_path, model_type="granite", logits_scaling=8.0, **fields)
    assert (spec.embedding_scale, spec.residual_scale, spec.logits_scale) == (12.0, 0.2, 0.125)
    assert spec.attention.score_scale == 0.5


def test_a_text_part_is_a_model(tmp_path: Path) -> None:
    """With what only the whole says."""
    text = {name: value for name, value in MINIMAL.items() if name not in ("model_type", "vocab_size")}
    fields = dict.fromkeys(text, ...) | {"model_type": "mistral3", "text_config": text, "torch_dtype": "bfloat16"}
    assert read(tmp_path, **fields) == read(tmp_path, model_type="mistral", torch_dtype="bfloat16")


@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_says_whether_logits_are_by_the_embedding(tmp_path: Path, tied: bool) -> None:
    """Transformers writes what it made of the whole there, and its default of text models into the part."""
    text = MINIMAL | {"tie_word_embeddings": not tied}
    fields = dict.fromkeys(text, ...) | {"model_type": "mistral3", "text_config": text}
    assert read(tmp_path, **fields).tie_embeddings is not tied
    assert read(tmp_path, **(fields | {"tie_word_embeddings": tied})).tie_embeddings is tied


def test_which_biases_there_are(tmp_path: Path) -> None:
    def read_biases(**fields: Any) -> tuple[bool, bool]:
        attention = read(tmp_path, **fields).attention
        return attention.bias, attention.output_bias

    assert read_biases(model_type="qwen2_moe") == (True, False)
    assert read_biases(model_type="qwen2_moe", qkv_bias=False, attention_bias=True) == (False, False)
    assert read_biases(model_type="gpt_oss") == (True, True)
    assert read_biases(model_type="gpt_oss", attention_bias=False) == (False, False)
    assert read_biases(model_type="seed_oss") == (True, False)


def test_the_text_part_may_say_what_it_is(tmp_path: Path) -> None:
    fields = {"model_type": "ministral3", "rope_parameters": YARN_BY_POSITION}
    text = {name: value for name, value in MINIMAL.items() if name != "vocab_size"} | fields
    whole = read(tmp_path, **(dict.fromkeys(text, ...) | {"model_type": "mistral3", "text_config": text}))
    assert whole == read(tmp_path, **fields)
    assert whole.ropes[0].query_growth == 0.1


def test_yarn_parameters(tmp_path: Path) -> None:
    same = {"factor": 4.0, "attention_factor": 1.25, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False}
    full = same | {"rope_type": "yarn", "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2}
    wanted = same | {"kind": "yarn", "original_max_position": 64, "beta_fast": 16.0, "beta_slow": 2.0}
    assert read(tmp_path, rope_scaling=full).ropes[0] == msgspec.convert(wanted, RopeSpec)


def test_only_the_cache_is_quantized(tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    assert read(tmp_path, quantization_config=config) == read(tmp_path)


def test_end_tokens(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=[4, 5]).eos_token_ids == (4, 5)
    assert read(tmp_path, eos_token_id=None).eos_token_ids == ()
    assert read(tmp_path, model_type="qwen2").eos_token_ids == ()
    assert read(tmp_path, bos_token_id=None).bos_token_id is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model_type": ...}, "model_type is missing"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported natively; supported: "),
        (MOE | {"num_experts_per_tok": 129}, "num_experts_per_tok (129) is more than num_experts (128)"),
        (MOE | {"num_experts": 1025}, "num_experts is 1025: expected an integer of at most 1024"),
        (MOE | {"mlp_only_layers": [0, "1"]}, "mlp_only_layers is [0, '1']: expected a list of layers' numbers"),
        (MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0: expected an integer of at least 1"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"hidden_size": "48"}, "hidden_size is '48'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: expected an integer of at most 4096"),
        ({"num_attention_heads": 10**9}, "num_attention_heads is 1000000000: expected an integer of at most 65536"),
        ({"num_key_value_heads": 4}, "num_attention_heads (6) is not a multiple of num_key_value_heads (4)"),
        ({"hidden_size": 50}, "hidden_size (50) is not a multiple of num_attention_heads (6); set head_dim"),
        ({"head_dim": 7}, "head_dim is 7: rotary position embeddings need an even number"),
        ({"head_dim": 65538}, "head_dim is 65538: expected an integer of at most 65536"),
        ({"hidden_size": 6 * 65538}, "hidden_size (393228) makes heads of 65538: expected at most 65536"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"eos_token_id": 2**31}, "eos_token_id is 2147483648: expected a token id"),
        ({"hidden_act": "relu6"}, "hidden_act 'relu6' is not supported; supported: silu, gelu"),
        ({"torch_dtype": "int8"}, "torch_dtype 'int8' is not supported; supported: float32, bfloat16, float16"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config (awq) is not supported"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}},
            "quantization_config.format is None; supported: 'float-quantized'",
        ),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': expected true or false"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear': expected an object"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.rope_type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor is None: expected a list"),
        (LONG_ROPE | {"head_dim": 32}, "rope_scaling has 2 factors for 16 pairs of dimensions"),
        ({"model_type": "glm4", "partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"model_type": "glm4", "head_dim": 10}, "partial_rotary_factor turns 5 of 10 dimensions: expected an even"),
        ({"model_type": "mistral", "rope_parameters": YARN_BY_POSITION}, "llama_4_scaling_beta other than 0"),
        ({"model_type": "ministral3", "rope_parameters": {"rope_type": "default"}}, "rope_type 'default' is not"),
        ({"model_type": "olmo3", "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must have the sections"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers must be a list of"),
        ({"model_type": "smollm3", "no_rope_layers": [[], 1, 0]}, "no_rope_layers must be a list of"),
        ({"model_type": "ernie4_5", "use_bias": True}, "use_bias is True: supported: 0"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling is 0: expected a positive number"),
        ({"is_causal": False}, "is_causal is false: tokens that see later ones are not supported"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
        (
            GEMMA4 | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9},
            "vocab_size_per_layer_input other than vocab_size is not supported",
        ),
        (GEMMA4 | {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2: no layer before has layer 2's keys"),
        (GEMMA4 | {"num_kv_shared_layers": 9}, "num_kv_shared_layers is 9: "),
        (GEMMA4 | {"enable_moe_block": True}, "enable_moe_block is True: supported: 0"),
        (GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 4}, "(4) does not divide 6 heads"),
        ({"model_type": "mistral3", "text_config": {"model_type": "bert"}}, "model_type 'bert' is not supported"),
        ({"model_type": "mistral3", "text_config": {"vocab_size": 0}}, "text_config.vocab_size is 0"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor is 0.5"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "rope_scaling.low_freq_factor (4) must be"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters differs by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types must be a list of"),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 3}, "layer_types has 'linear_attention'"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, "set use_sliding_window"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1"),
        (GPT_OSS | {"swiglu_limit": 6.0}, "swiglu_limit other than 7 is not supported"),
        (GPT_OSS | {"swiglu_alpha": 1.0}, "swiglu_alpha other than 1.702 is not supported"),
        (GPT_OSS | {"layer_types": ["sliding_attention"]}, "layer_types must be a list of"),
        (GPT_OSS | {"quantization_config": BLOCKS}, "quantization_config quantizes experts that are one tensor"),
    ],
)
def test_errors_name_the_field(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, **fields)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "config.json"))
    assert problem in message
    assert "\n" not in message


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        read_spec(tmp_path)


def test_loads_no_torch() -> None:
    program = "import sys, toka_async.checkpoint.generation, toka_async.checkpoint.hub; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_formats_of_weights_are_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    assert read_spec(folder).name_formats("bfloat16") == "bfloat16"
    assert read_spec(folder, "fp8").name_formats("bfloat16") == "bfloat16, weights in fp8/channel"
    edit = json.loads((folder / "config.json").read_text()) | {"quantization_config": BLOCKS}
    (folder / "config.json").write_text(json.dumps(edit))
    assert read_spec(folder).name_formats("float32") == "float32, weights in fp8/block"
