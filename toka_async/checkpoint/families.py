"""The model families as data: what their `config.json` leaves unsaid.

Values are the defaults of transformers' configuration classes. Knows no files and no layers.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from toka_async.checkpoint.attention_spec import HeadNormSpec
from toka_async.checkpoint.experts_spec import CLAMPED_SWIGLU, ExpertNames
from toka_async.checkpoint.layer_spec import NormNames
from toka_async.checkpoint.rope_spec import RopeDefaults

Windows = Literal["none", "all", "all_if_used", "by_layer", "by_type", "by_type_if_used"]
Scales = Literal["none", "granite", "gemma", "gemma4"]

# Where norms stand that follow both halves of a layer, and those that stand on both sides.
AFTER = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")
GEMMA = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
VAULT_GEMMA = NormNames(before_feed="pre_feedforward_layernorm")
GLM4 = NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class ExpertsFamily(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of one `model_type`.

    inner_field: names their inner size. renormalizes: None: norm_topk_prob says, or renormalizes_unsaid where it is
    absent. in_all_layers: otherwise decoder_sparse_step and mlp_only_layers say in which. shared: the inner size of an
    expert of all tokens, unless shared_expert_intermediate_size names it; 0: there is none. activation: whatever
    hidden_act says; None: as that says.
    """

    names: ExpertNames
    num_experts: int
    top_k: int
    inner_field: str
    inner: int
    renormalizes: bool | None
    in_all_layers: bool
    activation: str | None = None
    bias: bool = False
    renormalizes_unsaid: bool = False
    shared: int = 0


class DeltaNetFamily(msgspec.Struct, frozen=True):
    """The layers of one `model_type` that have a state in place of keys and values. by_head: see `DeltaNetSpec`.

    interval: every so many layers has attention, where `layer_types` and `full_attention_interval` do not say it.
    """

    by_head: bool
    num_key_heads: int = 16
    num_value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    width: int = 4
    interval: int = 4


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One `model_type`. A bias of None is what a flag says: `attention_bias`, `mlp_bias`, or one named here.

    num_kv_heads, head_dim: where the configuration has none; None: num_attention_heads, and hidden_size /
    num_attention_heads. A num_kv_heads that does not divide num_attention_heads counts as None. qkv_bias_field,
    output_bias_field: name the flags of these biases. qkv_bias_unsaid, output_bias_unsaid: what counts where the
    flag is absent. fused_qkv, fused_gate_up: the checkpoint has these projections as one tensor of this name;
    empty: each by itself. gated: attention has gates. delta_net: of layers without attention. ropes_by_type: layers
    with a window have a rope of their own. skips_ropes: `no_rope_layers` names layers without. ropes_in_windows: in
    models with windows, only layers that have one have a rope. windows: all_if_used: `use_sliding_window`;
    by_layer: also `max_window_layers`, `layer_types`; by_type: `layer_types`, and without them all but each
    `period`th layer (0: all layers); by_type_if_used: likewise if `use_sliding_window`, and without types those
    without a rope. scales: whose fields of scales and soft caps the configuration has. tied: logits are by the
    embedding, where it is not said. heads_by_type: layers that see all have heads of `global_head_dim`, and maybe
    no values of their own. value_norm, scalar: see `AttentionSpec`, `LayerSpec`. layer_inputs: their size where
    `hidden_size_per_layer_input` does not say it; 0: the family has none. refused: fields that must be 0, false or
    absent, and their values where they are not said.
    """

    max_positions: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    qkv_bias_field: str = "attention_bias"
    output_bias_field: str = "attention_bias"
    qkv_bias_unsaid: bool = False
    output_bias_unsaid: bool = False
    mlp_bias: bool | None = False
    fused_qkv: str = ""
    fused_gate_up: str = ""
    activation: str = "silu"
    head_norm: HeadNormSpec | None = None
    gated: bool = False
    delta_net: DeltaNetFamily | None = None
    norms: NormNames = NormNames()
    norm_eps: float = 1e-6
    norm_adds_one: bool = False
    rope: RopeDefaults = RopeDefaults()
    ropes_by_type: bool = False
    skips_ropes: bool = False
    ropes_in_windows: bool = False
    sinks: bool = False
    windows: Windows = "none"
    window: int = 4096  # where none is named; 0: none
    period: int = 0
    scales: Scales = "none"
    soft_caps: tuple[float, float] = (0.0, 0.0)  # of scores and of logits, where none are named; of scores 0: never
    tied: bool = False
    heads_by_type: bool = False
    value_norm: bool = False
    scalar: str = ""
    layer_inputs: int = 0
    refused: tuple[tuple[str, int], ...] = ()
    experts: ExpertsFamily | None = None
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()


_QWEN3_NEXT = Family(
    max_positions=32768,
    num_kv_heads=2,
    head_dim=256,
    qkv_bias=None,
    output_bias=None,
    head_norm=HeadNormSpec(adds_one=True),
    gated=True,
    delta_net=DeltaNetFamily(by_head=True),
    norm_adds_one=True,
    rope=RopeDefaults(part=0.25),
    experts=ExpertsFamily(
        names=ExpertNames(),
        num_experts=512,
        top_k=10,
        inner_field="moe_intermediate_size",
        inner=512,
        renormalizes=None,
        renormalizes_unsaid=True,
        in_all_layers=False,
        shared=512,
    ),
)
_QWEN3_5 = replace(_QWEN3_NEXT, num_kv_heads=4, delta_net=DeltaNetFamily(by_head=False), experts=None)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    num_kv_heads=2,
    experts=ExpertsFamily(
        names=ExpertNames(),
        num_experts=256,
        top_k=8,
        inner_field="moe_intermediate_size",
        inner=512,
        renormalizes=True,
        in_all_layers=True,
        shared=512,
    ),
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        max_positions=2048,
        qkv_bias=None,
        output_bias=None,
        mlp_bias=None,
        bos_token_ids=(1,),
        eos_token_ids=(2,),
    ),
    "mistral": Family(
        max_positions=131072,
        num_kv_heads=8,
        windows="all",
        bos_token_ids=(1,),
        eos_token_ids=(2,),
    ),
    "qwen2": Family(
        max_positions=32768,
        num_kv_heads=32,
        qkv_bias=True,
        windows="by_layer",
    ),
    "qwen3": Family(
        max_positions=32768,
        num_kv_heads=32,
        head_dim=128,
        qkv_bias=None,
        output_bias=None,
        head_norm=HeadNormSpec(),
        windows="by_layer",
    ),
    "qwen3_moe": Family(
        max_positions=32768,
        num_kv_heads=4,
        qkv_bias=None,
        output_bias=None,
        head_norm=HeadNormSpec(),
        windows="all_if_used",
        experts=ExpertsFamily(
            names=ExpertNames(),
            num_experts=128,
            top_k=8,
            inner_field="moe_intermediate_size",
            inner=768,
            renormalizes=None,
            in_all_layers=False,
        ),
    ),
    "qwen2_moe": Family(
        max_positions=32768,
        num_kv_heads=16,
        qkv_bias=None,
        qkv_bias_field="qkv_bias",
        qkv_bias_unsaid=True,
        refused=(("use_sliding_window", 0),),
        experts=ExpertsFamily(
            names=ExpertNames(),
            num_experts=60,
            top_k=4,
            inner_field="moe_intermediate_size",
            inner=1408,
            renormalizes=None,
            in_all_layers=False,
            shared=5632,
        ),
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "mixtral": Family(
        max_positions=131072,
        num_kv_heads=8,
        norm_eps=1e-5,
        rope=RopeDefaults(theta=1e6),
        windows="all",
        window=0,
        bos_token_ids=(1,),
        eos_token_ids=(2,),
        experts=ExpertsFamily(
            names=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
            num_experts=8,
            top_k=2,
            inner_field="intermediate_size",
            inner=14336,
            renormalizes=True,
            in_all_layers=True,
        ),
    ),
    "gpt_oss": Family(
        max_positions=131072,
        num_kv_heads=8,
        head_dim=64,
        qkv_bias=None,
        output_bias=None,
        qkv_bias_unsaid=True,
        output_bias_unsaid=True,
        norm_eps=1e-5,
        rope=RopeDefaults(
            theta=150000.0,
            scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        ),
        sinks=True,
        windows="by_type",
        window=128,
        period=2,
        experts=ExpertsFamily(
            names=ExpertNames(router="mlp.router", gate_up="gate_up_proj", down="down_proj"),
            num_experts=128,
            top_k=4,
            inner_field="intermediate_size",
            inner=2880,
            renormalizes=True,
            in_all_layers=True,
            activation=CLAMPED_SWIGLU,
            bias=True,
        ),
    ),
    "olmo2": Family(
        max_positions=2048,
        qkv_bias=None,
        output_bias=None,
        head_norm=HeadNormSpec("projection"),
        norms=AFTER,
        norm_eps=1e-5,
        eos_token_ids=(50279,),
    ),
    "olmo3": Family(
        max_positions=2048,
        qkv_bias=None,
        output_bias=None,
        head_norm=HeadNormSpec("projection"),
        norms=AFTER,
        norm_eps=1e-5,
        rope=RopeDefaults(theta=500000.0),
        ropes_by_type=True,
        windows="by_type",
        period=4,
        eos_token_ids=(50279,),
    ),
    "olmoe": Family(
        max_positions=4096,
        qkv_bias=None,
        output_bias=None,
        head_norm=HeadNormSpec("projection"),
        norm_eps=1e-5,
        refused=(("clip_qkv", 0),),
        eos_token_ids=(50279,),
        experts=ExpertsFamily(
            names=ExpertNames(),
            num_experts=64,
            top_k=8,
            inner_field="intermediate_size",
            inner=2048,
            renormalizes=None,
            in_all_layers=True,
        ),
    ),
    "smollm3": Family(
        max_positions=32768,
        num_kv_heads=4,
        qkv_bias=None,
        output_bias=None,
        mlp_bias=None,
        rope=RopeDefaults(theta=2000000.0),
        skips_ropes=True,
        windows="by_type_if_used",
        window=0,
        tied=True,
        bos_token_ids=(128000,),
        eos_token_ids=(128001,),
    ),
    "phi3": Family(
        max_positions=4096,
        fused_qkv="self_attn.qkv_proj",
        fused_gate_up="mlp.gate_up_proj",
        norm_eps=1e-5,
        rope=RopeDefaults(part=1.0),
        windows="all",
        window=0,
        bos_token_ids=(1,),
        eos_token_ids=(32000,),
    ),
    "granite": Family(
        max_positions=2048,
        qkv_bias=None,
        output_bias=None,
        mlp_bias=None,
        scales="granite",
        bos_token_ids=(1,),
        eos_token_ids=(2,),
    ),
    "glm": Family(
        max_positions=131072,
        num_kv_heads=2,
        head_dim=128,
        qkv_bias=None,
        qkv_bias_unsaid=True,
        fused_gate_up="mlp.gate_up_proj",
        norm_eps=1.5625e-07,
        rope=RopeDefaults(part=0.5, interleaved=True),
        eos_token_ids=(151329, 151336, 151338),
    ),
    "glm4": Family(
        max_positions=131072,
        num_kv_heads=2,
        head_dim=128,
        qkv_bias=None,
        qkv_bias_unsaid=True,
        fused_gate_up="mlp.gate_up_proj",
        norms=GLM4,
        norm_eps=1.5625e-07,
        rope=RopeDefaults(part=0.5, interleaved=True),
        eos_token_ids=(151329, 151336, 151338),
    ),
    "seed_oss": Family(
        max_positions=524288,
        num_kv_heads=8,
        head_dim=128,
        qkv_bias=None,
        qkv_bias_unsaid=True,
        output_bias=None,
        output_bias_field="attention_out_bias",
        mlp_bias=None,
        bos_token_ids=(0,),
        eos_token_ids=(2,),
    ),
    "ernie4_5": Family(
        max_positions=131072,
        num_kv_heads=2,
        head_dim=128,
        norm_eps=1e-5,
        rope=RopeDefaults(theta=500000.0, interleaved=True),
        tied=True,
        refused=(("use_bias", 0),),
        bos_token_ids=(1,),
        eos_token_ids=(2,),
    ),
    "helium": Family(
        max_positions=4096,
        num_kv_heads=20,
        head_dim=128,
        qkv_bias=None,
        mlp_bias=None,
        norm_eps=1e-8,
        rope=RopeDefaults(theta=100000.0, interleaved=True),
        bos_token_ids=(1,),
        eos_token_ids=(2,),
    ),
    "exaone4": Family(
        max_positions=2048,
        head_norm=HeadNormSpec(),
        norms=AFTER,
        norm_eps=1e-5,
        ropes_in_windows=True,
        windows="by_type",
        period=4,
        bos_token_ids=(0,),
        eos_token_ids=(2,),
    ),
    "ministral": Family(
        max_positions=131072,
        num_kv_heads=8,
        windows="by_type",
        bos_token_ids=(1,),
        eos_token_ids=(2,),
    ),
    "ministral3": Family(
        max_positions=262144,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope=RopeDefaults(
            scaling={
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            grows=True,
        ),
        windows="all",
        window=0,
        bos_token_ids=(1,),
        eos_token_ids=(2,),
    ),
    "gemma": Family(
        max_positions=8192,
        num_kv_heads=16,
        head_dim=256,
        qkv_bias=None,
        output_bias=None,
        activation="gelu_pytorch_tanh",
        norm_adds_one=True,
        scales="gemma",
        tied=True,
        bos_token_ids=(2,),
        eos_token_ids=(1,),
    ),
    "gemma2": Family(
        max_positions=8192,
        num_kv_heads=4,
        head_dim=256,
        qkv_bias=None,
        output_bias=None,
        activation="gelu_pytorch_tanh",
        norms=GEMMA,
        norm_adds_one=True,
        windows="by_type",
        period=2,
        scales="gemma",
        soft_caps=(50.0, 30.0),
        tied=True,
        bos_token_ids=(2,),
        eos_token_ids=(1,),
    ),
    "vaultgemma": Family(
        max_positions=8192,
        num_kv_heads=4,
        head_dim=256,
        qkv_bias=None,
        output_bias=None,
        activation="gelu_pytorch_tanh",
        norms=VAULT_GEMMA,
        norm_adds_one=True,
        windows="by_type",
        period=2,
        scales="gemma",
        soft_caps=(50.0, 30.0),
        tied=True,
        bos_token_ids=(2,),
        eos_token_ids=(1,),
    ),
    "gemma3_text": Family(
        max_positions=131072,
        num_kv_heads=4,
        head_dim=256,
        qkv_bias=None,
        output_bias=None,
        activation="gelu_pytorch_tanh",
        head_norm=HeadNormSpec(adds_one=True),
        norms=GEMMA,
        norm_adds_one=True,
        rope=RopeDefaults(theta=1e6, local_theta=10000.0),
        ropes_by_type=True,
        windows="by_type",
        period=6,
        scales="gemma",
        tied=True,
        bos_token_ids=(2,),
        eos_token_ids=(1,),
    ),
    "gemma4_text": Family(
        max_positions=131072,
        num_kv_heads=4,
        head_dim=256,
        qkv_bias=None,
        output_bias=None,
        activation="gelu_pytorch_tanh",
        head_norm=HeadNormSpec(),
        norms=GEMMA,
        rope=RopeDefaults(theta=1e6, kind="proportional", part=0.25, local_theta=10000.0),
        ropes_by_type=True,
        windows="by_type",
        window=512,
        period=6,
        scales="gemma4",
        tied=True,
        heads_by_type=True,
        value_norm=True,
        scalar="layer_scalar",
        layer_inputs=256,
        refused=(("enable_moe_block", 0),),
        bos_token_ids=(2,),
        eos_token_ids=(1,),
    ),
}

# Models with several parts, of which the text part is run: what its own `model_type` is if it does not say.
TEXT_PARTS = {
    "mistral3": "mistral",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
