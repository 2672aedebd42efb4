"""Ranks as processes that gloo connects, for tests: four, of which the first two and three are groups as well."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.mean_attention import MeanAttention, load, run
from toka_async.model.comm import Comm, DistributedComm, join
from toka_async.model.compiled import CompiledForward
from toka_async.model.decoder import Decoder

NUM_RANKS = 4
SIZES = (2, 3, 4)
CPU = torch.device("cpu")


def answers_of_ranks(folder: Path, checkpoints: dict[int, list[Path]]) -> dict[int, list[dict[str, Any]]]:
    """What every rank of each size answers, see `_answers`; the checkpoints by size."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_rank, args=(folder, rank, checkpoints)) for rank in range(NUM_RANKS)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
    finally:
        for process in processes:
            process.kill()
    return {size: [torch.load(_file(folder, size, rank)) for rank in range(size)] for size in SIZES}


def _rank(folder: Path, rank: int, checkpoints: dict[int, list[Path]]) -> None:
    torch.set_num_threads(1)
    join(f"file://{folder / 'group'}", rank, NUM_RANKS, CPU)
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if rank < size:
            torch.save(_answers(DistributedComm(group, CPU), checkpoints[size]), _file(folder, size, rank))
    dist.destroy_process_group()


def _answers(comm: Comm, checkpoints: list[Path]) -> dict[str, Any]:
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (comm.rank + 1)
    return {
        "place": (comm.rank, comm.size),
        "sum": comm.all_reduce(own.clone()),
        "rows": comm.all_gather(own, 0),
        "columns": comm.all_gather(own.T, 1),
        "exchanged": comm.all_to_all(torch.arange(2 * comm.size).view(comm.size, 2) + 100 * comm.rank),
        "scattered": comm.reduce_scatter(torch.arange(4.0 * comm.size).view(-1, 2) * (comm.rank + 1)),
        "nothing": comm.all_gather(comm.all_reduce(own[:0]), 1),
        "minimum": comm.minimum(10 - comm.rank),
        "first": comm.of_first(bytes([comm.rank]) * (3 + comm.rank)),
        "compiled": compiled_error(load(checkpoints[-1], comm)) if comm.size == 2 else 0.0,
        "logits": {path.name: run(load(path, comm)) for path in checkpoints},
        "own": {path.name: own_logits(load(path, comm)) for path in checkpoints},
    }


@torch.inference_mode()
def own_logits(decoder: Decoder) -> torch.Tensor:
    """Of the rank's share of 12 rows."""
    hidden = torch.randn(12, decoder.norm.weight.numel(), generator=torch.Generator().manual_seed(0)).double()
    return torch.cat([decoder.own_logits(hidden), decoder.logits(hidden)])


def compiled_error(decoder: Decoder) -> float:
    """The largest difference that compiling makes, for several numbers of tokens."""
    compiled = CompiledForward(decoder, MeanAttention(1), compiler="eager")
    worst = 0.0
    for num_tokens in (7, 9):
        ids = torch.arange(num_tokens)
        with torch.inference_mode():
            expected = decoder(ids, ids, MeanAttention(1))
        worst = max(worst, float((compiled(ids, ids) - expected).abs().max()))
    assert compiled.num_eager == 0
    return worst


def _file(folder: Path, size: int, rank: int) -> Path:
    return folder / f"{size}-{rank}"
