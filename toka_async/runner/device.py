"""What a rank computes on and with: device, type of numbers, threads.

Knows configuration and hardware; knows no model but its size.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import nn

from toka_async.config import AttentionConfig, ModelConfig
from toka_async.model.spec import ModelError, ModelSpec
from toka_async.runner.place import ALONE, Place

_SMALL_PARAMETERS = 10_000_000


def resolve_device(model: ModelConfig, place: Place = ALONE) -> torch.device:
    """`auto` is the rank's GPU where there is one; it becomes the current one."""
    if model.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        num_devices = torch.cuda.device_count()
        if place.device_index >= num_devices:
            raise ModelError(
                f"parallel.dp={place.num_sharing // place.world_size}, parallel.pp={place.num_stages}, "
                f"parallel.tp={place.size}: each of {place.num_sharing} ranks needs a GPU where this machine shows "
                f"{num_devices}; use fewer, or model.device=cpu"
            )
        torch.cuda.set_device(place.device_index)
        return torch.device("cuda", place.device_index)
    if model.device == "cuda":
        raise ModelError("model.device=cuda: this machine has no CUDA device that torch can use; use cpu or auto")
    return torch.device("cpu")


def resolve_dtype(model: ModelConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, else the checkpoint's."""
    name = model.dtype
    if name == "auto":
        return torch.float32 if device.type == "cpu" else getattr(torch, spec.dtype)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_num_threads(attention: AttentionConfig, decoder: nn.Module, num_sharing: int = 1) -> int:
    """`auto` is one thread for small models and all cores for others, divided among those who share them.

    Measured on two cores, one thread and two: 2M parameters decode 64 rows in 11 ms and 20, and one row in 2.6 and 3.1;
    20M parameters decode one row in 19 ms and 10.
    """
    if attention.num_threads != "auto":
        return attention.num_threads
    small = sum(parameter.numel() for parameter in decoder.parameters()) < _SMALL_PARAMETERS
    return 1 if small else max(1, len(os.sched_getaffinity(0)) // num_sharing)


def has_kernels(device: torch.device) -> bool:
    """Whether our kernels run there."""
    return device.type == "cuda" and find_spec("triton") is not None
