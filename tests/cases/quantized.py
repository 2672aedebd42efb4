"""Checkpoints of 8-bit floats: the fields of config.json as published models have them, and tensors to match."""

from __future__ import annotations

from typing import Any

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
