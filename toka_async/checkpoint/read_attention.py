"""Reads each layer's attention, and a model's scales, from its `config.json`, by what its family leaves unsaid."""

from __future__ import annotations

import msgspec

from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.families import Family
from toka_async.checkpoint.json_file import JsonFile
from toka_async.checkpoint.rope_spec import RopeSpec, read_rope, read_ropes

# Far beyond any model; objects for more would take all memory.
MOST_HEADS = 65536
LARGEST_HEAD = 65536  # values


class ModelScales(msgspec.Struct, frozen=True):
    """See `ModelSpec` and `AttentionSpec`. scores: None: as usual. A soft cap of 0: none."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    scores: float | None = None
    scores_soft_cap: float = 0.0
    logits_soft_cap: float = 0.0


def read_scales(file: JsonFile, family: Family, hidden_size: int) -> ModelScales:
    if family.scales == "granite":
        return ModelScales(
            embedding=file.number("embedding_multiplier", 1.0),
            residual=file.number("residual_multiplier", 1.0),
            logits=1 / _read_positive(file, "logits_scaling", 1.0),
            scores=file.number("attention_multiplier", 1.0),
        )
    if family.scales in ("gemma", "gemma4"):
        of_scores, of_logits = (
            file.number(name, default) if file.fields.get(name, default) is not None else 0.0
            for name, default in zip(
                ("attn_logit_softcapping", "final_logit_softcapping"), family.soft_caps, strict=True
            )
        )
        if family.scales == "gemma4":
            return ModelScales(embedding=hidden_size**0.5, scores=1.0, logits_soft_cap=of_logits)
        has_scalar = file.has("query_pre_attn_scalar")
        return ModelScales(
            embedding=hidden_size**0.5,
            scores=_read_positive(file, "query_pre_attn_scalar", 1.0) ** -0.5 if has_scalar else None,
            scores_soft_cap=of_scores if family.soft_caps[0] else 0.0,
            logits_soft_cap=of_logits,
        )
    return ModelScales()


def _read_positive(file: JsonFile, name: str, default: float) -> float:
    value = file.number(name, default)
    if not value:
        raise file.error(name, "is 0: expected a positive number")
    return value


def read_attentions(file: JsonFile, family: Family, num_layers: int, scales: ModelScales) -> list[AttentionSpec]:
    """Returns each layer's."""
    if file.fields.get("use_bidirectional_attention") in (True, "all"):
        raise file.error("use_bidirectional_attention", "is set: tokens that see later ones are not supported")
    if not file.flag("is_causal", True):
        raise file.error("is_causal", "is false: tokens that see later ones are not supported")
    num_heads, num_kv_heads, head_dim = _read_heads(file, family)
    alike = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=None,
        scale=scales.scores,
        soft_cap=scales.scores_soft_cap,
        sinks=family.sinks,
        bias=read_bias(file, family.qkv_bias_field, family.qkv_bias, family.qkv_bias_unsaid),
        output_bias=read_bias(file, family.output_bias_field, family.output_bias, family.output_bias_unsaid),
        head_norm=family.head_norm,
        gated=family.gated,
        fused=family.fused_qkv,
        value_norm=family.value_norm,
    )
    max_positions = file.integer("max_position_embeddings", family.max_positions)
    have_rope = _find_ropes(file, family, num_layers)
    windows = _read_windows(file, family, have_rope)
    if family.ropes_in_windows and file.fields.get("sliding_window", family.window):
        have_rope = [window > 0 for window in windows]
    if family.heads_by_type:
        windows[-1] = 0  # whatever is said, as in transformers
    ropes = _read_ropes(file, family, max_positions, windows)
    attentions = [
        msgspec.structs.replace(
            alike if window or not family.heads_by_type else _read_global(file, alike, layer),
            window=window,
            rope=rope if has_rope else None,
        )
        for layer, (window, rope, has_rope) in enumerate(zip(windows, ropes, have_rope, strict=True))
    ]
    if family.heads_by_type:
        attentions = _share_keys(file, attentions)
    for attention in dict.fromkeys(attentions):
        if attention.rope is not None:
            _check_rope(file, attention.rope, attention.head_dim)
    return attentions


def _share_keys(file: JsonFile, attentions: list[AttentionSpec]) -> list[AttentionSpec]:
    """Has the last `num_kv_shared_layers` read the keys of the last layer before them that is like them."""
    first = len(attentions) - file.integer("num_kv_shared_layers", 0, least=0)
    shared = []
    for number, attention in enumerate(attentions[max(0, first) :], first):
        source = next((each for each in reversed(range(max(0, first))) if attentions[each] == attention), None)
        if source is None:
            raise file.error(
                "num_kv_shared_layers", f"is {len(attentions) - first}: no layer before has layer {number}'s keys"
            )
        shared.append(msgspec.structs.replace(attention, reads_back=number - source))
    return attentions[:first] + shared


def _read_global(file: JsonFile, attention: AttentionSpec, layer: int) -> AttentionSpec:
    """Returns the attention of layers that see all, in families where it has a shape of its own."""
    values_are_keys = file.flag("attention_k_eq_v", False)
    num_kv_heads, head_dim = attention.num_kv_heads, attention.head_dim
    if file.has("per_layer_config"):  # as transformers saves it
        own = file.section("per_layer_config").section(str(layer))
        num_kv_heads = own.integer("num_key_value_heads", num_kv_heads)
        head_dim = own.integer("head_dim", head_dim, most=LARGEST_HEAD)
    else:
        head_dim = file.integer("global_head_dim", 512, most=LARGEST_HEAD)
        if values_are_keys:
            num_kv_heads = file.integer("num_global_key_value_heads", num_kv_heads)
    if attention.num_heads % num_kv_heads:
        raise file.error("num_global_key_value_heads", f"({num_kv_heads}) does not divide {attention.num_heads} heads")
    return msgspec.structs.replace(
        attention, num_kv_heads=num_kv_heads, head_dim=head_dim, values_are_keys=values_are_keys
    )


def _read_ropes(file: JsonFile, family: Family, max_positions: int, windows: list[int]) -> list[RopeSpec]:
    if not family.ropes_by_type:
        return [read_rope(file, max_positions, family.rope)] * len(windows)
    whole, windowed = read_ropes(file, max_positions, family.rope)
    return [windowed if window else whole for window in windows]


def _check_rope(file: JsonFile, rope: RopeSpec, head_dim: int) -> None:
    turned = rope.count_turned(head_dim)
    if not turned or turned % 2:
        raise file.error("partial_rotary_factor", f"turns {turned} of {head_dim} dimensions: expected an even number")
    for factors in (rope.short_factors, rope.long_factors):
        if rope.kind == "longrope" and len(factors) != turned // 2:
            raise file.error("rope_scaling", f"has {len(factors)} factors for {turned // 2} pairs of dimensions")


def _find_ropes(file: JsonFile, family: Family, num_layers: int) -> list[bool]:
    """Returns which layers have a rope."""
    if not family.skips_ropes:
        return [True] * num_layers
    listed = file.fields.get("no_rope_layers")
    if listed is None:
        interval = file.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) != num_layers or not all(each in (0, 1) for each in listed):
        raise file.error(
            "no_rope_layers", f"must be a list of num_hidden_layers ({num_layers}) entries, 0 without a rope"
        )
    return list(map(bool, listed))


def _read_heads(file: JsonFile, family: Family) -> tuple[int, int, int]:
    """Returns the numbers of query heads and of KV heads, and the size of a head."""
    hidden, heads = file.integer("hidden_size"), file.integer("num_attention_heads", most=MOST_HEADS)
    default = heads
    if "num_key_value_heads" not in file.fields and family.num_kv_heads and heads % family.num_kv_heads == 0:
        default = family.num_kv_heads
    kv_heads = file.integer("num_key_value_heads", default)
    if heads % kv_heads:
        raise file.error("num_attention_heads", f"({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    if "head_dim" not in file.fields and family.head_dim:
        head_dim = family.head_dim
    elif file.has("head_dim"):
        head_dim = file.integer("head_dim", most=LARGEST_HEAD)
    elif hidden % heads:
        raise file.error("hidden_size", f"({hidden}) is not a multiple of num_attention_heads ({heads}); set head_dim")
    else:
        head_dim = hidden // heads
    if head_dim > LARGEST_HEAD:
        raise file.error("hidden_size", f"({hidden}) makes heads of {head_dim}: expected at most {LARGEST_HEAD}")
    if head_dim % 2:
        raise file.error("head_dim", f"is {head_dim}: rotary position embeddings need an even number")
    return heads, kv_heads, head_dim


def read_bias(file: JsonFile, name: str, of_family: bool | None, default: bool = False) -> bool:
    return file.flag(name, default) if of_family is None else of_family


def _read_windows(file: JsonFile, family: Family, have_rope: list[bool]) -> list[int]:
    """Returns each layer's window. have_rope: which layers have one."""
    num_layers = len(have_rope)
    if family.windows == "none":
        return [0] * num_layers
    # Absent means the family's window (Mistral 7B v0.1 relies on it), null means none.
    window = file.fields.get("sliding_window", family.window)
    window = file.integer("sliding_window", window) if window else 0
    if family.windows == "all":
        return [window] * num_layers
    if family.windows != "by_type" and not file.flag("use_sliding_window", False):
        window = 0
    if family.windows == "all_if_used":
        return [window] * num_layers
    if file.has("layer_types"):
        return [_find_window(file, kind, window) for kind in read_layer_types(file, num_layers)]
    if family.windows == "by_layer":
        first = file.integer("max_window_layers", 28, least=0)
        return [window if layer >= first else 0 for layer in range(num_layers)]
    if family.windows == "by_type_if_used":
        return [0 if has_rope else window for has_rope in have_rope]
    period = file.integer("sliding_window_pattern", family.period or num_layers + 1)
    return [window if (layer + 1) % period else 0 for layer in range(num_layers)]


def read_layer_types(file: JsonFile, num_layers: int) -> list[object]:
    kinds = file.fields["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise file.error("layer_types", f"must be a list of num_hidden_layers ({num_layers}) entries")
    return kinds


def _find_window(file: JsonFile, kind: object, window: int) -> int:
    if kind == "full_attention":
        return 0
    if kind != "sliding_attention":
        raise file.error("layer_types", f"has {kind!r}; supported: full_attention, sliding_attention")
    if not window:
        raise file.error("layer_types", "has sliding_attention: set use_sliding_window and sliding_window as well")
    return window
