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

# Sizes of which two tensor ranks have whole blocks.
SIZES = heads(4, 2, 128, head_dim=128, intermediate_size=256)


def quantize_checkpoint(dense: Path, folder: Path, config: dict[str, Any], scales: torch.dtype = torch.float32) -> Path:
    """Writes a dense checkpoint of `make_checkpoint` anew with quantized matrices. Returns `folder`."""
    shutil.copytree(dense, folder)
    by_block = config["quant_method"] == "fp8"
    quantization = read_quantization(JsonFile(folder / "config.json", {"quantization_config": config}))
    assert quantization is not None
    fields = json.loads((dense / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        tensors[name] = tensor
        is_matrix = name.endswith("weight") and ("_proj" in name or ".experts." in name)
        if is_matrix and quantization.covers(name.removesuffix(".weight")):
            tile = (BLOCK, BLOCK) if by_block else (1, tensor.shape[1])
            tensors[name], found = quantize(tensor, *tile)
            tensors[name.replace("weight", quantization.scale_name)] = found.to(scales)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def dequantize_checkpoint(quantized: Path, folder: Path) -> Path:
    """Writes a quantized checkpoint anew with the matrices that it stands for, in float32. Returns `folder`."""
    shutil.copytree(quantized, folder)
    fields = json.loads((quantized / "config.json").read_text())
    by_block = fields.pop("quantization_config")["quant_method"] == "fp8"
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = load_file(quantized / "model.safetensors")
    for name in [name for name in tensors if "weight_scale" in name]:
        weight = f"{name.rpartition('.')[0]}.weight"
        tile = (BLOCK, BLOCK) if by_block else (1, tensors[weight].shape[1])
        tensors[weight] = dequantize(tensors[weight], tensors.pop(name).float(), *tile)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
