"""Resolves what a rank computes on and with: device, dtype, threads."""

from __future__ import annotations

import logging
import os
import warnings

import torch

from toka_async.attention.kv_cache import E4M3
from toka_async.checkpoint.spec import ModelError, ModelSpec
from toka_async.config import AttentionConfig, CacheConfig, Config, ModelConfig
from toka_async.kernels.support import LEAST_E4M3, explain_no_kernels
from toka_async.startup.gpu_absence import explain_unusable
from toka_async.startup.rank_coords import ALONE, RankCoords
from toka_async.tuning.store import TuningCache, describe_gpu, find_folder

logger = logging.getLogger(__name__)

_SMALL_PARAMETERS = 10_000_000


def resolve_device(model: ModelConfig, place: RankCoords = ALONE) -> torch.device:
    """Resolves `auto` to the rank's GPU where there is one, which becomes the current one."""
    if model.device == "cpu":
        return torch.device("cpu")
    reason = _explain_cuda_failure()
    if reason is None:
        num_devices = torch.cuda.device_count()
        if place.device_index >= num_devices:
            dp = place.num_sharing * place.num_nodes // place.world_size
            of_nodes = f", cluster.nodes={place.num_nodes}" if place.num_nodes > 1 else ""
            raise ModelError(
                f"parallel.dp={dp}, parallel.pp={place.num_stages}, parallel.tp={place.size}{of_nodes}: each of "
                f"{place.num_sharing} ranks needs a GPU where this machine shows "
                f"{num_devices}; use fewer, or model.device=cpu"
            )
        torch.cuda.set_device(place.device_index)
        device = torch.device("cuda", place.device_index)
        if (slow := explain_no_kernels(device)) and place.device_index == 0:
            logger.warning("the GPU is used without kernels of ours and without graphs, and so is slow: %s", slow)
        return device
    unusable = explain_unusable(reason)
    if model.device == "cuda":
        raise ModelError(f"model.device=cuda: {unusable or 'there is no NVIDIA GPU here'}; or use model.device=cpu")
    if unusable and place.device_index == 0:
        logger.warning("the GPU is not used, and the CPU is far slower: %s", unusable)
    return torch.device("cpu")


def _explain_cuda_failure() -> str | None:
    """Explains why torch has no GPU, in its own words if it says so; None: it has one."""
    with warnings.catch_warnings(record=True) as caught:  # torch gives its reason only as a warning
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    return str(caught[-1].message) if caught else ""


def check_weight_formats(spec: ModelSpec, device: torch.device) -> None:
    """Raises ModelError for a GPU that cannot multiply 8-bit floats, if the model's weights are."""
    if not has_kernels(device) or all(layer.format == "dense" for layer in spec.layers):
        return
    from toka_async.kernels.fp8.ops import LEAST_CAPABILITY

    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, capability))
        raise ModelError(
            f"the model's weights are 8-bit floats: expected a GPU of compute capability {needed}, got {found}; "
            "use a checkpoint in bfloat16, without model.quantize"
        )


def resolve_dtype(model: ModelConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """Resolves `auto` to float32 on a CPU, otherwise to the checkpoint's dtype."""
    name = model.dtype
    if name == "auto":
        return torch.float32 if device.type == "cpu" else getattr(torch, spec.dtype)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_stored_dtype(cache: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """Resolves what keys and values are stored as. dtype: that the model computes in."""
    return E4M3 if cache.dtype == "fp8" else dtype


def check_stored_dtype(cache: CacheConfig, device: torch.device) -> None:
    """Raises ModelError if the device cannot convert what the cache stores."""
    if cache.dtype != "fp8" or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_E4M3:
        raise ModelError(
            f"cache.dtype=fp8: expected a GPU of compute capability 8.9 or more, which converts E4M3, got "
            f"{capability[0]}.{capability[1]}; use auto"
        )


def resolve_num_threads(attention: AttentionConfig, num_parameters: int, num_sharing: int = 1) -> int:
    """Resolves `auto` to one thread for small models, otherwise to this rank's share of all cores.

    Measured with one thread and two: 2M parameters decode 64 rows in 11 ms and 20, one row in 2.6 and 3.1; 20M
    parameters one row in 19 and 10.
    """
    if attention.num_threads != "auto":
        return attention.num_threads
    return 1 if num_parameters < _SMALL_PARAMETERS else max(1, len(os.sched_getaffinity(0)) // num_sharing)


def name_device(device: torch.device) -> str:
    """Names the device for people: the GPU's name and memory, or how many threads of the CPU are used."""
    if device.type == "cuda":
        of_gpu = torch.cuda.get_device_properties(device)
        return f"{of_gpu.name} ({of_gpu.total_memory / (1 << 30):.0f} GiB)"
    num_threads = torch.get_num_threads()
    return f"CPU ({num_threads} thread{'' if num_threads == 1 else 's'})"


def name_gpus(most: int) -> list[str]:
    """Names the first GPUs as no others in the world. A part of a GPU (MIG) has a UUID of its own since CUDA 12."""
    count = min(most, torch.cuda.device_count())
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def name_types(spec: ModelSpec, dtype: torch.dtype, cache: CacheConfig) -> str:
    """Names the model's dtype for people, and the types of weights and of the cache if they are others."""
    types = spec.name_formats(name_dtype(dtype))
    types += ", cache in fp8" if cache.dtype == "fp8" else ""
    return f"{types}, states in {cache.state_dtype}" if spec.recurrences and cache.state_dtype != "float32" else types


def has_kernels(device: torch.device) -> bool:
    """Tells whether our kernels run there."""
    return not explain_no_kernels(device)


def open_tuning_cache(device: torch.device, config: Config) -> TuningCache:
    """Opens the cache of measurements, most of which depend on whether products are tuned; empty on a CPU."""
    if device.type == "cpu":
        return TuningCache(None, {})
    return TuningCache(find_folder(config.tuning.dir), {**describe_gpu(device), "tuned": config.tuning.products})
