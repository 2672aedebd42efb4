"""Describes a rank's device once it is ready: its name, and what has taken its memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from toka_async.messages import RankDevice
from toka_async.startup.device import name_device
from toka_async.startup.memory import read_available_memory
from toka_async.weights.rank_control import SleepingCache


def describe_device(
    rank: int, device: torch.device, types: str, weights: int, caches: Sequence[SleepingCache]
) -> RankDevice:
    """types: for people. weights: their bytes."""
    cache = sum(each.num_bytes for each in caches)
    if device.type == "cuda":
        used = torch.cuda.memory_reserved(device) + sum(each.mapped_bytes for each in caches)
        free, total = torch.cuda.mem_get_info(device)
    else:
        used = weights + cache
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = max(
            0, read_available_memory() - cache
        )  # the cache counts as free, since hardly a page has been written yet
    return RankDevice(
        rank=rank,
        device=name_device(device),
        dtype=types,
        weights=weights,
        cache=cache,
        used=used,
        free=free,
        total=total,
    )


def count_weight_bytes(model: nn.Module) -> int:
    """Counts the bytes of parameters and buffers; memory that several of them share counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
