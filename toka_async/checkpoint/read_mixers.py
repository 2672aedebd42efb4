"""Reads each layer's mixer from its `config.json`: attention, or a recurrence in some layers of some families."""

from __future__ import annotations

from collections.abc import Sequence

from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.delta_net_spec import DeltaNetSpec
from toka_async.checkpoint.families import DeltaNetFamily, Family
from toka_async.checkpoint.json_file import JsonFile
from toka_async.checkpoint.layer_spec import MixerSpec
from toka_async.checkpoint.read_attention import MOST_HEADS, read_layer_types

RECURRENT, FULL = "linear_attention", "full_attention"


def read_mixers(file: JsonFile, family: Family, attentions: Sequence[AttentionSpec]) -> list[MixerSpec]:
    """attentions: what each layer has if it has attention. Raises ModelError."""
    if family.delta_net is None:
        return [*attentions]
    recurrence = _read_delta_net(file, family.delta_net)
    if file.has("layer_types"):
        kinds = read_layer_types(file, len(attentions))
    else:
        interval = file.integer("full_attention_interval", family.delta_net.interval)
        kinds = [RECURRENT if (layer + 1) % interval else FULL for layer in range(len(attentions))]
    for kind in kinds:
        if kind not in (RECURRENT, FULL):
            raise file.error("layer_types", f"has {kind!r}; supported: {RECURRENT}, {FULL}")
    if FULL not in kinds:
        raise file.error("layer_types", f"has no {FULL}: a model of recurrent layers alone is not supported")
    return [attention if kind == FULL else recurrence for kind, attention in zip(kinds, attentions, strict=True)]


def _read_delta_net(file: JsonFile, family: DeltaNetFamily) -> DeltaNetSpec:
    key_heads = file.integer("linear_num_key_heads", family.num_key_heads, most=MOST_HEADS)
    value_heads = file.integer("linear_num_value_heads", family.num_value_heads, most=MOST_HEADS)
    if value_heads % key_heads:
        raise file.error(
            "linear_num_value_heads", f"({value_heads}) is not a multiple of linear_num_key_heads ({key_heads})"
        )
    return DeltaNetSpec(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=file.integer("linear_key_head_dim", family.key_dim),
        value_dim=file.integer("linear_value_head_dim", family.value_dim),
        width=file.integer("linear_conv_kernel_dim", family.width, least=2),
        by_head=family.by_head,
    )
