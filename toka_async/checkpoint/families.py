"""The model families as data: what their `config.json` leaves unsaid.

Values are the defaults of transformers' configuration classes. Knows no files and no layers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from toka_async.checkpoint.attention_spec import HeadNormSpec
from toka_async.checkpoint.experts_spec import CLAMPED_SWIGLU, ExpertNames

Windows = Literal["none", "all", "all_if_used", "by_layer", "in_turns"]


class ExpertsFamily(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of one `model_type`.

    inner_field: names their inner size. renormalizes: None: norm_topk_prob says. in_all_layers: otherwise
    decoder_sparse_step and mlp_only_layers say in which. activation: whatever hidden_act says; None: as that says.
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


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One `model_type`. A bias of None is read from the configuration."""

    max_positions: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    head_norm: HeadNormSpec | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope: dict[str, Any] = {}  # fields of rope_scaling where there is none
    sinks: bool = False
    # all_if_used: use_sliding_window; by_layer: also max_window_layers, layer_types; in_turns: layer_types, or every
    # other layer from the first on
    windows: Windows = "none"
    window: int = 4096  # where none is named; 0: none
    experts: ExpertsFamily | None = None
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()


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
    "mixtral": Family(
        max_positions=131072,
        num_kv_heads=8,
        norm_eps=1e-5,
        rope_theta=1e6,
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
        qkv_bias=True,
        output_bias=True,
        norm_eps=1e-5,
        rope_theta=150000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        sinks=True,
        windows="in_turns",
        window=128,
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
}
