"""Reads the parameters of rotary position embeddings from `config.json`.

Knows the names and defaults of both spellings; computes no angles.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from toka_async.checkpoint.json_file import LARGEST, JsonFile

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
_SECTIONS = "full_attention", "sliding_attention"  # of models whose layers with a window have a rope of their own
_LONG_NAMES = ("su", "yarn")  # what Phi-3's configurations call longrope as well


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embeddings (arXiv:2104.09864) and their stretching; fields of other kinds keep their defaults.

    part: of a head's dimensions, the first ones, that turn; of proportional kind it is the first ones of each half, as
    fast as if all turned. interleaved: neighbours turn together; otherwise the halves of what turns do.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    part: float = 1.0
    interleaved: bool = False
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position: int = 0  # llama3, yarn, longrope: positions of the pre-training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope: scale of cos and sin; None: derived from other fields
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 0.0  # yarn; 0: not used
    mscale_all_dim: float = 0.0  # yarn; 0: not used
    truncate: bool = True  # yarn: round the range of corrected dimensions to whole ones
    query_growth: float = 0.0  # yarn: g of queries times 1 + g * log(1 + position // original_max_position)
    short_factors: tuple[float, ...] = ()  # longrope: of each pair's wavelength, for contexts of the pre-training
    long_factors: tuple[float, ...] = ()  # longrope: for longer ones
    is_long: bool = False  # longrope: whether the longer ones are used, for all contexts

    def count_turned(self, head_dim: int) -> int:
        """Counts the dimensions of a head that turn."""
        return int(head_dim * self.part)

    def order_head(self, head_dim: int) -> tuple[int, ...]:
        """Orders a head's dimensions so that halves of what turns do so together, and not neighbours.

        Products of queries and keys do not change when both are reordered, so weights are as they are
        loaded. Empty: the dimensions are in that order.
        """
        if not self.interleaved:
            return ()
        turned = self.count_turned(head_dim)
        return *range(0, turned, 2), *range(1, turned, 2), *range(turned, head_dim)

    def max_context(self, max_positions: int) -> int:
        """Returns the tokens of a sequence; linear and yarn stretch `max_position_embeddings`."""
        if self.kind == "linear":
            return int(min(max_positions * self.factor, LARGEST))
        if self.kind == "yarn":
            return max(max_positions, int(min(self.original_max_position * self.factor, LARGEST)))
        return max_positions


class RopeDefaults(msgspec.Struct, frozen=True):
    """What a family's configurations leave unsaid.

    part: of a head that turns; None: all, whatever is said. local_theta: of layers with a window, which otherwise have
    the usual kind; None: as of others. scaling: the fields of `rope_scaling` where there is none. grows: queries grow
    with their position, by `llama_4_scaling_beta`. They do so before norms of heads, so a family has one or the other.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    part: float | None = None
    interleaved: bool = False
    local_theta: float | None = None
    scaling: dict[str, Any] = {}
    grows: bool = False


def read_rope(file: JsonFile, max_positions: int, defaults: RopeDefaults) -> RopeSpec:
    """Raises ModelError for a kind or parameter that is not supported."""
    name = "rope_scaling" if file.has("rope_scaling") else "rope_parameters"
    rope = file.section(name) if file.has(name) else JsonFile(file.path, defaults.scaling, f"{name}.")
    if any(isinstance(value, dict) for value in rope.fields.values()):
        raise file.error(name, "differs by layer type, which is not supported for this model_type")
    return _read(file, rope, max_positions, defaults)


def read_ropes(file: JsonFile, max_positions: int, defaults: RopeDefaults) -> tuple[RopeSpec, RopeSpec]:
    """Reads the rope of layers that see all, and that of layers with a window, which is never stretched by default."""
    rope, scaling = file.section("rope_parameters"), file.section("rope_scaling")
    if rope.fields and not any(isinstance(rope.fields.get(name), dict) for name in _SECTIONS):
        raise file.error("rope_parameters", "must have the sections full_attention and sliding_attention")
    theta = file.number("rope_theta", defaults.theta, least=1.0)
    local = (
        theta if defaults.local_theta is None else file.number("rope_local_base_freq", defaults.local_theta, least=1)
    )
    whole = {"rope_theta": theta} | rope.section("full_attention").fields | scaling.fields
    windowed = {"rope_theta": local} | rope.section("sliding_attention").fields
    sections = (JsonFile(file.path, fields, rope.prefix) for fields in (whole, windowed))
    usual = RopeDefaults(theta=local)
    first, second = map(_read, (file, file), sections, (max_positions, max_positions), (defaults, usual))
    return first, second


def _read(file: JsonFile, rope: JsonFile, max_positions: int, defaults: RopeDefaults) -> RopeSpec:
    theta = rope.number("rope_theta", file.number("rope_theta", defaults.theta), least=1.0)
    kind = rope.text("rope_type", rope.text("type", defaults.kind))
    if rope.has("short_factor") and kind in _LONG_NAMES:
        kind = "longrope"
    if kind not in get_args(RopeKind):
        raise rope.error(
            "rope_type",
            f"{kind!r} is not supported natively; supported: {', '.join(get_args(RopeKind))}; "
            "for others try model.impl=transformers",
        )
    if defaults.grows and kind != "yarn":
        raise rope.error("rope_type", f"{kind!r} is not supported for this model_type; supported: yarn")
    part = rope.number("partial_rotary_factor", file.number("partial_rotary_factor", defaults.part or 1.0))
    if not 0 < part <= 1:
        raise rope.error("partial_rotary_factor", f"is {part:g}: expected more than 0, and at most 1")
    if defaults.part is None and part != 1:
        raise file.error("partial_rotary_factor", "other than 1 is not supported for this model_type")
    base = RopeSpec(theta=theta, part=part, interleaved=defaults.interleaved)
    if kind == "linear":
        return msgspec.structs.replace(base, kind="linear", factor=rope.number("factor", least=1.0))
    original = rope.integer("original_max_position_embeddings", max_positions)
    # A value outside of the section precedes it, as in transformers.
    original = file.integer("original_max_position_embeddings", original)
    if kind == "llama3":
        return _llama3(rope, base, original)
    if kind == "yarn":
        return _yarn(rope, base, original, max_positions, defaults.grows)
    if kind == "proportional":
        return msgspec.structs.replace(base, kind="proportional")
    if kind == "longrope":
        return _longrope(rope, base, original, max_positions)
    return base


def _llama3(rope: JsonFile, base: RopeSpec, original: int) -> RopeSpec:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not 0 < low < high:
        raise rope.error("low_freq_factor", f"({low:g}) must be above 0 and below high_freq_factor ({high:g})")
    return msgspec.structs.replace(
        base,
        kind="llama3",
        factor=rope.number("factor", least=1.0),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: JsonFile, base: RopeSpec, original: int, max_positions: int, grows: bool) -> RopeSpec:
    growth = rope.number("llama_4_scaling_beta", 0.0)
    if growth and not grows:
        raise rope.error("llama_4_scaling_beta", "other than 0 is not supported for this model_type")
    return msgspec.structs.replace(
        base,
        kind="yarn",
        factor=rope.number("factor", max(1.0, max_positions / original), least=1.0),
        original_max_position=original,
        attention_factor=rope.number("attention_factor") if rope.has("attention_factor") else None,
        # 0 means the default, as in transformers.
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        truncate=rope.flag("truncate", True),
        query_growth=growth,
    )


def _longrope(rope: JsonFile, base: RopeSpec, original: int, max_positions: int) -> RopeSpec:
    return msgspec.structs.replace(
        base,
        kind="longrope",
        factor=rope.number("factor", max(1.0, max_positions / original), least=1.0),
        original_max_position=original,
        attention_factor=rope.number("attention_factor") if rope.has("attention_factor") else None,
        short_factors=_read_factors(rope, "short_factor"),
        long_factors=_read_factors(rope, "long_factor"),
        is_long=max_positions > original,
    )


def _read_factors(rope: JsonFile, name: str) -> tuple[float, ...]:
    factors = rope.fields.get(name)
    if not isinstance(factors, list) or not all(isinstance(each, int | float) and each > 0 for each in factors):
        raise rope.error(name, f"is {factors!r}: expected a list of positive numbers")
    return tuple(map(float, factors))
