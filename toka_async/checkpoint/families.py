"""The model families as data: what their `config.json` leaves unsaid.

Values are the defaults of transformers' configuration classes. Knows no files and no layers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Windows = Literal["none", "all", "by_layer"]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One `model_type`. A bias of None is read from the configuration."""

    max_positions: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    windows: Windows = "none"  # by_layer: use_sliding_window, max_window_layers, layer_types
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
        qk_norm=True,
        windows="by_layer",
    ),
}
