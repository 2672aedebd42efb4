"""Refuses a model that is too large before its weights are loaded, with the sizes and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from msgspec.structs import replace

from toka_async.checkpoint.cost import count_stage_bytes
from toka_async.checkpoint.division import (
    StagePart,
    join_layers,
    make_rank_spec,
    make_stage_spec,
    stage_parts,
    tensor_sizes,
)
from toka_async.checkpoint.spec import ModelError, ModelSpec
from toka_async.startup.memory import read_available_memory, read_free_cuda_memory

MAX_TENSOR_RANKS = 16  # at most, in a proposal
MOST_WEIGHTS = 0.8  # of the free memory, in a proposal of a number of GPUs
GIB = 1 << 30


def count_rank_bytes(spec: ModelSpec, part: StagePart, tp: int, dtype: torch.dtype) -> int:
    """Counts the weights' bytes of each of `tp` ranks of a stage; vocabularies are padded to be divided."""
    rank_spec = replace(make_rank_spec(spec, tp), vocab_size=-(-spec.vocab_size // tp))
    return count_stage_bytes(make_stage_spec(rank_spec, part), part.is_first, part.is_last, dtype.itemsize)


def check_weights_fit(spec: ModelSpec, part: StagePart, tp: int, dtype: torch.dtype, free: int, kind: str) -> None:
    """Raises ModelError that says what would fit when a rank's weights take more than the `free` bytes."""
    needed = count_rank_bytes(spec, part, tp, dtype)
    if needed < free:
        return
    of_type = spec.name_formats(str(dtype).removeprefix("torch."))
    sizes = f"{_format_gib(needed)} of weights in {of_type} where {_format_gib(max(free, 0))} are free"
    if kind == "cpu":
        half = dtype.itemsize == 4 and needed / 2 < free
        advice = "set model.dtype=bfloat16, which takes half" if half else "use a smaller model, or a larger machine"
        raise ModelError(f"model.path: this model does not fit into memory: {sizes}; {advice}")
    raise ModelError(
        f"model.path: this model does not fit into the GPU's memory: {sizes}; {advise(spec, tp, dtype, free)}"
    )


def advise(spec: ModelSpec, tp: int, dtype: torch.dtype, free: int) -> str:
    """Says how many GPUs with so many free bytes would hold the weights, and leave room for steps and the cache."""
    free = int(MOST_WEIGHTS * free)
    for size in tensor_sizes(spec):
        if tp < size <= MAX_TENSOR_RANKS and count_rank_bytes(spec, stage_parts(spec, 1, size)[0], size, dtype) < free:
            return f"set parallel.tp={size} (or parallel.pp), with as many GPUs"
    for pp in range(2, len(join_layers(spec)) + 1):
        if all(count_rank_bytes(spec, part, tp, dtype) < free for part in stage_parts(spec, pp, tp)):
            return f"set parallel.pp={pp}, with {pp * tp} GPUs"
    return "use a smaller model"


@contextmanager
def catch_lost_memory(spec: ModelSpec, part: StagePart, tp: int, dtype: torch.dtype) -> Iterator[None]:
    """Raises ModelError instead of torch's own error if others have taken the memory since it was measured."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        needed = _format_gib(count_rank_bytes(spec, part, tp, dtype))
        raise ModelError(
            f"model.path: there was no memory left for {needed} of weights; end what else uses it, or use fewer "
            "replicas or a smaller model"
        ) from None


def measure_free_bytes(device: torch.device, fraction: float) -> int:
    """Measures the memory that weights may take: of the machine, or a share of the GPU's."""
    return read_available_memory() if device.type == "cpu" else read_free_cuda_memory(device, fraction)


def _format_gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
