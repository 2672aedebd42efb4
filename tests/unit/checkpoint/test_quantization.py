from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases.quantized import BLOCKS, CHANNELS, TENSORS
from toka_async.checkpoint.json_file import JsonFile, ModelError
from toka_async.checkpoint.quantization import FORMATS, Quantization, read_quantization


def read(folder: Path, config: dict[str, Any]) -> Quantization | None:
    path = folder / "config.json"
    path.write_text(json.dumps({"quantization_config": config} if config else {}))
    return read_quantization(JsonFile(path))


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value in one place."""
    copied: dict[str, Any] = json.loads(json.dumps(config))
    *folders, last = path.split("/")
    section = copied
    for name in folders:
        section = section[name]
    section[last] = value
    return copied


def test_a_checkpoint_that_is_not_quantized(tmp_path: Path) -> None:
    assert read(tmp_path, {}) is None
    assert read(tmp_path, {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}) is None


def test_blocks(tmp_path: Path) -> None:
    found = read(tmp_path, BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp", "o_proj"]})
    assert found is not None
    assert (found.scaling, found.scale_name) == ("block", "weight_scale_inv")
    names = ("lm_head", "model.layers.1.mlp.gate_proj", "model.layers.0.self_attn.o_proj")
    assert not any(map(found.covers, names))
    assert all(map(found.covers, ("model.layers.0.mlp.gate_proj", "model.layers.11.mlp.down_proj")))
    assert found.covers("model.layers.1.mlp_other")


def test_channels(tmp_path: Path) -> None:
    found = read(tmp_path, CHANNELS | {"ignore": ["lm_head", "model.layers.1.mlp.up_proj", "re:.*q_proj"]})
    assert found is not None
    assert (found.scaling, found.scale_name) == ("channel", "weight_scale")
    assert not any(map(found.covers, ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.3.self_attn.q_proj")))
    assert all(map(found.covers, ("model.layers.11.mlp.up_proj", "model.layers.0.self_attn.k_proj")))


def test_compressed_blocks(tmp_path: Path) -> None:
    config = changed(CHANNELS, "config_groups/group_0/weights/strategy", "block")
    config = changed(config, "config_groups/group_0/weights/block_structure", [128, 128])
    config = changed(config, "config_groups/group_0/input_activations/strategy", "group")
    config = changed(config, "config_groups/group_0/input_activations/group_size", 128)
    assert read(tmp_path, config) == Quantization("block", "weight_scale", ("lm_head$",))


GROUP = "config_groups/group_0"
MODELOPT: dict[str, Any] = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}


def test_a_scale_for_each_matrix(tmp_path: Path) -> None:
    """Static scales of inputs are not needed."""
    expected = Quantization("tensor", "weight_scale", (r"(.*\.)?lm_head(\.|$)",))
    assert read(tmp_path, TENSORS) == expected
    older = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
    assert read(tmp_path, older) == expected
    compressed = changed(CHANNELS, f"{GROUP}/weights/strategy", "tensor")
    for strategy, is_dynamic in (("token", True), ("tensor", True), ("tensor", False)):
        compressed = changed(compressed, f"{GROUP}/input_activations/strategy", strategy)
        compressed = changed(compressed, f"{GROUP}/input_activations/dynamic", is_dynamic)
        assert read(tmp_path, compressed) == Quantization("tensor", "weight_scale", ("lm_head$",))


def test_modelopt(tmp_path: Path) -> None:
    """Its fields may be in a file of their own. Names are patterns as those of files."""
    inside = read(tmp_path, MODELOPT | {"quant_method": "modelopt", "ignore": ["lm_head", "model.layers.1.mlp*"]})
    own: dict[str, Any] = {"quantization": MODELOPT | {"exclude_modules": ["lm_head", "*layers.1.m*"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    for found in (inside, read(tmp_path, {})):
        assert found is not None
        assert (found.scaling, found.scale_name) == ("tensor", "weight_scale")
        assert not any(map(found.covers, ("lm_head", "model.layers.1.mlp.up_proj")))
        assert all(map(found.covers, ("model.layers.11.mlp.up_proj", "model.layers.1.self_attn.q_proj")))
    own["quantization"]["quant_algo"] = "NVFP4"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(ModelError, match=r"hf_quant_config.json: quantization.quant_algo is 'NVFP4'; supported: 'FP8'"):
        read(tmp_path, {})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "awq"}, "quantization_config (awq) is not supported; supported: fp8"),
        (changed(BLOCKS, "weight_block_size", [64, 128]), "weight_block_size is [64, 128]"),
        (changed(BLOCKS, "activation_scheme", "static"), "activation_scheme is 'static'; supported: 'dynamic'"),
        (changed(BLOCKS, "fmt", "e5m2"), "fmt is 'e5m2'"),
        (changed(BLOCKS, "modules_to_not_convert", "lm_head"), "modules_to_not_convert is 'lm_head': expected a list"),
        (changed(CHANNELS, "format", "pack-quantized"), "format is 'pack-quantized'"),
        (changed(CHANNELS, "config_groups", {"a": {}, "b": {}}), "config_groups has 2 groups"),
        (changed(CHANNELS, f"{GROUP}/targets", ["Embedding"]), "targets is ['Embedding']"),
        (changed(CHANNELS, f"{GROUP}/weights/num_bits", 4), "weights.num_bits is 4; supported: 8"),
        (changed(CHANNELS, f"{GROUP}/weights/strategy", "group"), "weights.strategy is 'group'; supported: 'channel'"),
        (changed(TENSORS, "activation_scheme", "other"), "activation_scheme is 'other'; supported: 'dynamic'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'; supported: 'FP8'"),
        (changed(CHANNELS, f"{GROUP}/input_activations", None), "input_activations.num_bits is None"),
        (changed(CHANNELS, f"{GROUP}/input_activations/dynamic", False), "input_activations.dynamic is False"),
        (changed(CHANNELS, f"{GROUP}/input_activations/strategy", "block"), "input_activations.strategy is 'block'"),
        (changed(CHANNELS, "ignore", ["re:*"]), "ignore has '*', which is no regular expression"),
    ],
    ids=str,
)
def test_other_formats_are_refused(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as raised:
        read(tmp_path, config)
    assert named in str(raised.value)


@pytest.mark.parametrize(("name", "size"), [("fp8/channel", 512 + 4 * 4), ("fp8/block/weight_scale_inv", 512 + 4)])
def test_formats_count_values_and_scales(name: str, size: int) -> None:
    assert FORMATS[name].format == name
    assert FORMATS[name].count_bytes(4, 128) == size
