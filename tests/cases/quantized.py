"""Checkpoints of 8-bit floats: the fields of config.json as published models have them, and tensors to match."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.cases.models import heads
from toka_async.checkpoint.json_file import JsonFile
from toka_async.checkpoint.quantization import BLOCK, read_quantization
from toka_async.model.matrices.scaling import dequantize, quantize

BLOCKS: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
CHANNELS: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "strategy": "token",
                "symmetric": True,
                "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "strategy": "channel",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
TENSORS: dict[str, Any] = {
    "activation_scheme": "static",
    "dequantize": False,
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "weight_block_size": None,
}

# Sizes of which two tensor ranks have whole blocks.
SIZES = heads(4, 2, 128, head_dim=128, intermediate_size=256)


def read_tile(folder: Path, config: dict[str, Any], shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the rows and columns that share a scale, of a matrix of a shape."""
    found = read_quantization(JsonFile(folder / "config.json", {"quantization_config": config}))
    assert found is not None
    n, k = shape
    return {"block": (BLOCK, BLOCK), "channel": (1, k), "tensor": (n, k)}[found.scaling]


def quantize_checkpoint(dense: Path, folder: Path, config: dict[str, Any], scales: torch.dtype = torch.float32) -> Path:
    """Writes a dense checkpoint of `make_checkpoint` anew with quantized matrices. Returns `folder`.

    Scales of whole matrices are numbers, by the names of transformers, and there are some of inputs.
    """
    shutil.copytree(dense, folder)
    quantization = read_quantization(JsonFile(folder / "config.json", {"quantization_config": config}))
    assert quantization is not None
    fields = json.loads((dense / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        tensors[name] = tensor
        is_matrix = name.endswith("weight") and ("_proj" in name or ".experts." in name)
        if is_matrix and quantization.covers(name.removesuffix(".weight")):
            tensors[name], found = quantize(tensor, *read_tile(folder, config, tensor.shape))
            scale_name = name.replace("weight", quantization.scale_name)
            if quantization.scaling == "tensor":
                tensors[name.replace("weight", "activation_scale")] = torch.tensor(0.5)
                tensors[f"{scale_name}_inv"] = found.view(()).to(scales)
            else:
                tensors[scale_name] = found.to(scales)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def dequantize_checkpoint(quantized: Path, folder: Path) -> Path:
    """Writes a quantized checkpoint anew with the matrices that it stands for, in float32. Returns `folder`."""
    shutil.copytree(quantized, folder)
    fields = json.loads((quantized / "config.json").read_text())
    config = fields.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = load_file(quantized / "model.safetensors")
    for name in [name for name in tensors if "weight_scale" in name]:
        weight = f"{name.rpartition('.')[0]}.weight"
        shape, scale = tensors[weight].shape, tensors.pop(name).float()
        scale = scale.view(1, 1) if scale.ndim < 2 else scale
        tensors[weight] = dequantize(tensors[weight], scale, *read_tile(folder, config, shape))
        tensors.pop(f"{name.rpartition('.')[0]}.activation_scale", None)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
