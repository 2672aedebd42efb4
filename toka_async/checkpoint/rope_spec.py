"""Reads the parameters of rotary position embeddings from `config.json`.

Knows the names and defaults of both spellings; computes no angles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from toka_async.checkpoint.json_file import JsonFile

RopeKind = Literal["default", "linear", "llama3", "yarn"]


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embeddings (arXiv:2104.09864) and their stretching; fields of other kinds keep their defaults."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position: int = 0  # llama3, yarn: positions of the pre-training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn: scale of cos and sin; None: derived from factor and the mscales
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 0.0  # yarn; 0: not used
    mscale_all_dim: float = 0.0  # yarn; 0: not used
    truncate: bool = True  # yarn: round the range of corrected dimensions to whole ones

    def max_context(self, max_positions: int) -> int:
        """Returns the tokens of a sequence; linear and yarn stretch `max_position_embeddings`."""
        if self.kind == "linear":
            return int(max_positions * self.factor)
        if self.kind == "yarn":
            return max(max_positions, int(self.original_max_position * self.factor))
        return max_positions


def read_rope(
    file: JsonFile, max_positions: int, theta: float = 10000.0, default: Mapping[str, Any] | None = None
) -> RopeSpec:
    """theta: where none is named. default: the section's fields where there is none.

    Raises ModelError for a kind or parameter that is not supported.
    """
    name = "rope_scaling" if file.has("rope_scaling") else "rope_parameters"
    rope = file.section(name) if file.has(name) or not default else JsonFile(file.path, dict(default), f"{name}.")
    theta = rope.number("rope_theta", file.number("rope_theta", theta), least=1.0)
    kind = rope.text("rope_type", rope.text("type", "default"))
    _check(file, name, rope, kind)
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=rope.number("factor", least=1.0))
    original = rope.integer("original_max_position_embeddings", max_positions)
    # A value outside of the section precedes it, as in transformers.
    original = file.integer("original_max_position_embeddings", original)
    if kind == "llama3":
        return _llama3(rope, theta, original)
    if kind == "yarn":
        return _yarn(rope, theta, original, max_positions)
    return RopeSpec(theta=theta)


def _check(file: JsonFile, name: str, rope: JsonFile, kind: str) -> None:
    if kind not in get_args(RopeKind):
        raise rope.error("rope_type", f"{kind!r} is not supported; supported: {', '.join(get_args(RopeKind))}")
    if any(isinstance(value, dict) for value in rope.fields.values()):
        raise file.error(name, "differs by layer type, which is not supported")
    for fields in (rope, file):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise file.error("partial_rotary_factor", "other than 1 is not supported")


def _llama3(rope: JsonFile, theta: float, original: int) -> RopeSpec:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not 0 < low < high:
        raise rope.error("low_freq_factor", f"({low:g}) must be above 0 and below high_freq_factor ({high:g})")
    return RopeSpec(
        theta=theta,
        kind="llama3",
        factor=rope.number("factor", least=1.0),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: JsonFile, theta: float, original: int, max_positions: int) -> RopeSpec:
    return RopeSpec(
        theta=theta,
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
    )
