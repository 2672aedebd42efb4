"""Reads how a checkpoint's matrices are quantized from the `quantization_config` of its `config.json`.

Three spellings are read: `quant_method` of "fp8" (128 x 128 blocks as DeepSeek and Qwen have, or one scale for each
matrix), "compressed-tensors" (a scale for each output, each matrix, or blocks), and "modelopt" (a scale for each
matrix), which may be in `hf_quant_config.json` instead. "mxfp4" (gpt-oss) is a format of files alone: weights are
dequantized as they are read. Knows no torch and no values.

Inputs are quantized by token, or by block of a token. So scales that a checkpoint has for all inputs of a matrix
(`activation_scheme` of "static") are not needed.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Any, Literal

import msgspec

from toka_async.checkpoint.json_file import JsonFile

BLOCK = 128  # rows and columns of a block
METHODS = "fp8, compressed-tensors of the format float-quantized, modelopt with quant_algo FP8, mxfp4"
SCALE = "weight_scale"
MODELOPT_FILE = "hf_quant_config.json"
Scaling = Literal["channel", "block", "tensor"]


class Quantization(msgspec.Struct, frozen=True):
    """Matrices of 8-bit floats (E4M3) with scales in float32.

    scaling: one scale for each output (`channel`), for each `BLOCK` x `BLOCK` values (`block`), or in the checkpoint
    for each matrix (`tensor`), repeated over its outputs. scale_name: of a scale's tensor, beside `weight`; empty: the
    checkpoint has none, and weights are quantized as they are loaded.
    ignored: regular expressions; a matrix whose name begins with a match is not quantized.
    """

    scaling: Scaling
    scale_name: str = ""
    ignored: tuple[str, ...] = ()

    @property
    def format(self) -> str:
        """A key of `FORMATS`."""
        return "/".join(("fp8", self.scaling, self.scale_name)).rstrip("/")

    def count_bytes(self, n: int, k: int) -> int:
        """Counts the bytes of [n, k] values and their scales."""
        num_scales = -(-n // BLOCK) * -(-k // BLOCK) if self.scaling == "block" else n
        return n * k + 4 * num_scales

    def covers(self, matrix: str) -> bool:
        """Tells whether a matrix is quantized. matrix: its name in the checkpoint, without `.weight`."""
        return not any(re.match(pattern, matrix) for pattern in self.ignored)


# The weight formats of `MatrixSpec` by name; which matrices they cover, a checkpoint says.
FORMATS: dict[str, Quantization] = {
    each.format: each
    for each in (
        Quantization("channel"),
        Quantization("block"),
        Quantization("channel", SCALE),
        Quantization("block", SCALE),
        Quantization("block", "weight_scale_inv"),
        Quantization("tensor", SCALE),
    )
}
# What `model.quantize` asks for, of a checkpoint that is not quantized.
MADE_AT_LOAD = {"fp8": Quantization("channel"), "fp8_block": Quantization("block")}


def read_quantization(file: JsonFile) -> Quantization | None:
    """Returns None for a checkpoint whose weights are not quantized once they are read.

    Raises ModelError for another format.
    """
    if not file.has("quantization_config"):
        own = file.path.with_name(MODELOPT_FILE)
        return _read_modelopt(JsonFile(own).section("quantization")) if own.is_file() else None
    config = file.section("quantization_config")
    method = config.text("quant_method", "unknown")
    if method == "mxfp4":
        return None
    if method == "fp8":
        return _read_fp8(config)
    if method == "modelopt":
        return _read_modelopt(config)
    if method == "compressed-tensors":
        # A checkpoint may have scales for a quantized cache only.
        return _read_compressed(config) if config.section("config_groups").fields else None
    raise file.error(
        "quantization_config", f"({method}) is not supported; supported: {METHODS}; or use the checkpoint in bfloat16"
    )


def announces_cache_scales(file: JsonFile) -> bool:
    """Tells whether a checkpoint says by a `kv_cache_scheme` that it has scales for a quantized cache."""
    return bool(file.section("quantization_config").fields.get("kv_cache_scheme"))


def name_default_dtype(file: JsonFile) -> str:
    """Names the dtype of a checkpoint that names none, as gpt-oss as published: what its MXFP4 stands for exactly."""
    is_packed = file.section("quantization_config").fields.get("quant_method") == "mxfp4"
    return "bfloat16" if is_packed else "float32"


def _read_fp8(config: JsonFile) -> Quantization:
    by_block = config.has("weight_block_size")
    if by_block:
        _expect(config, "weight_block_size", [BLOCK, BLOCK])
    if by_block or config.fields.get("activation_scheme") != "static":
        _expect(config, "activation_scheme", "dynamic")
    if config.has("fmt"):
        _expect(config, "fmt", "e4m3")
    names = [*_names(config, "modules_to_not_convert"), *_names(config, "ignored_layers")]
    # An entry is a module's name, with or without the modules around it, and means all that is inside.
    entries = tuple(rf"(.*\.)?{re.escape(name)}(\.|$)" for name in names)
    return Quantization("block", "weight_scale_inv", entries) if by_block else Quantization("tensor", SCALE, entries)


def _read_modelopt(config: JsonFile) -> Quantization:
    _expect(config, "quant_algo", "FP8")
    names = [*_names(config, "ignore"), *_names(config, "exclude_modules")]
    return Quantization("tensor", SCALE, tuple(map(fnmatch.translate, names)))


def _read_compressed(config: JsonFile) -> Quantization:
    _expect(config, "format", "float-quantized")
    groups = config.section("config_groups")
    if len(groups.fields) != 1:
        raise config.error("config_groups", f"has {len(groups.fields)} groups; supported: one, of all linear layers")
    group = groups.section(next(iter(groups.fields)))
    if "Linear" not in _names(group, "targets"):
        raise group.error("targets", f"is {group.fields.get('targets')!r}; supported: ['Linear']")
    weights, inputs = group.section("weights"), group.section("input_activations")
    for values in (weights, inputs):
        _expect(values, "num_bits", 8)
        _expect(values, "type", "float")
        _expect(values, "symmetric", True)
    scaling: Scaling = "channel"
    strategy = weights.text("strategy")
    if inputs.fields.get("strategy") != "tensor" or strategy == "block":
        _expect(inputs, "dynamic", True)
        _expect(inputs, "strategy", "group" if strategy == "block" else "token")
    if strategy == "block":
        _expect(weights, "block_structure", [BLOCK, BLOCK])
        _expect(inputs, "group_size", BLOCK)
        scaling = "block"
    elif strategy == "tensor":
        scaling = "tensor"
    else:
        _expect(weights, "strategy", "channel")
    names = _names(config, "ignore")
    ignored = (name[3:] if name.startswith("re:") else f"{re.escape(name)}$" for name in names)
    return Quantization(scaling, SCALE, tuple(_check_pattern(config, pattern) for pattern in ignored))


def _expect(file: JsonFile, name: str, value: Any) -> None:
    if (actual := file.fields.get(name)) != value:
        raise file.error(name, f"is {actual!r}; supported: {value!r}; or use the checkpoint in bfloat16")


def _names(file: JsonFile, field: str) -> list[str]:
    names = file.fields.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise file.error(field, f"is {names!r}: expected a list of strings")
    return names


def _check_pattern(file: JsonFile, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise file.error("ignore", f"has {pattern!r}, which is no regular expression ({error})") from None
    return pattern
