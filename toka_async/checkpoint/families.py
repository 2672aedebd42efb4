"""The model families as data: what their `config.json` leaves unsaid.

Values are the defaults of transformers' configuration classes. Knows no files and no layers.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from toka_async.checkpoint.attention_spec import HeadNormSpec
from toka_async.checkpoint.experts_spec import ExpertNames

Windows = Literal["none", "all", "all_if_used", "by_layer"]


class ExpertsFamily(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of one `model_type`.

    inner_field: names their inner size. renormalizes: None: norm_topk_prob says, or renormalizes_unsaid where it is
    absent. in_all_layers: otherwise decoder_sparse_step and mlp_only_layers say in which. shared: the inner size of an
    expert of all tokens, unless shared_expert_intermediate_size names it; 0: there is none.
    """

    names: ExpertNames
    num_experts: int
    top_k: int
    inner_field: str
    inner: int
    renormalizes: bool | None
    in_all_layers: bool
    renormalizes_unsaid: bool = False
    shared: int = 0


class DeltaNetFamily(msgspec.Struct, frozen=True):
    """The layers of one `model_type` that have a state in place of keys and values. by_head: see `DeltaNetSpec`."""

    by_head: bool
    num_key_heads: int = 16
    num_value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    width: int = 4
    interval: int = 4  # every so many layers has attention


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One `model_type`. A bias of None is read from the configuration."""

    max_positions: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    head_norm: HeadNormSpec | None = None
    gated: bool = False  # attention has gates
    delta_net: DeltaNetFamily | None = None
    norm_eps: float = 1e-6
    norm_adds_one: bool = False
    rope_theta: float = 10000.0
    rope_part: float | None = None  # of a head that turns, where none is named; None: all of it does
    windows: Windows = "none"  # all_if_used: use_sliding_window; by_layer: also max_window_layers, layer_types
    window: int = 4096  # where none is named; 0: none
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
    rope_part=0.25,
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
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_5,  # a configuration with other parts than text, which does not name the text's type
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
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
}
