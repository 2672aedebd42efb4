"""Ranks as processes that gloo connects, for tests: four, of which the first two and three are groups as well.

All four are two stages of two ranks, too.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fakes.mean_attention import in_shards, load, run
from toka_async.model.activation_layout import LayoutPolicy, Replicated
from toka_async.model.comm import DistributedComm, join
from toka_async.model.decoder import Decoder
from toka_async.model.overlap import build_overlapped
from toka_async.runner.links import StageLinks
from toka_async.startup.process_groups import build_links, make_pairs
from toka_async.startup.rank_coords import RankCoords

NUM_RANKS = 4
LENGTHS = (5, 1, 3, 4)  # of what stages send each other
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
    fuse_on_cpus()
    join(f"file://{folder / 'group'}", rank, NUM_RANKS, CPU)
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if rank < size:
            torch.save(_answers(DistributedComm(group, CPU), checkpoints[size]), _file(folder, size, rank))
    stages = [dist.new_group([2 * stage, 2 * stage + 1]) for stage in range(2)]
    tensor = DistributedComm(stages[rank // 2], CPU)
    for num_nodes in (1, 2):
        place = RankCoords(rank % 2, 2, rank // 2, 2, num_micro_batches=1, num_nodes=num_nodes)
        links = build_links(make_pairs(place, CPU), tensor, 3, torch.float32, 7, 5)
        with counting_sends() as sent:
            received = stage_answers(links, rank if num_nodes == 1 else rank // 2)
        torch.save((received, sent), folder / f"stage-{num_nodes}-{rank}")
    dist.destroy_process_group()


def fuse_on_cpus() -> None:
    """Torch's fused products have no kernels for CPUs: what it defines them to be takes their place."""
    memory = importlib.import_module("torch.distributed._symmetric_memory")
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        plain = getattr(memory, f"_fused_{name}_fallback")
        torch.library.impl(f"symm_mem::fused_{name}", "CPU", plain)


def overlapping(comm: DistributedComm) -> LayoutPolicy:
    """Steps of 6 tokens and more are in shards, by fused products."""
    return LayoutPolicy(Replicated(comm), build_overlapped(comm), 6)


def _answers(comm: DistributedComm, checkpoints: list[Path]) -> dict[str, Any]:
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
        "first": comm.agree(["rank", *range(3 + comm.rank)], list[str | int]),
        "models": {path.name: model_answers(load(path, comm), comm) for path in checkpoints},
    }


def model_answers(decoder: Decoder, comm: DistributedComm) -> dict[str, torch.Tensor]:
    """Logits in all ways, and of 12 rows the rank's own."""
    answers = {"whole": run(decoder)}
    for name, layouts in {"shards": in_shards(comm), "overlapped": overlapping(comm)}.items():
        decoder.layouts = layouts
        answers[name] = run(decoder)
    assert decoder.norm is not None
    with torch.inference_mode():
        hidden = torch.randn(12, decoder.norm.weight.numel(), generator=torch.Generator().manual_seed(0)).double()
        answers["own"] = torch.cat([decoder.own_logits(hidden), decoder.logits(hidden)])
    return answers


def make_residuals(length: int, number: int, sender: int) -> Tensor:
    """Residuals whose rows differ."""
    return (100.0 * torch.arange(length) + 10 * number + sender)[:, None].expand(length, 3).clone()


@contextmanager
def counting_sends() -> Iterator[dict[torch.dtype, int]]:
    """The bytes that links send meanwhile, by dtype."""
    sent: dict[torch.dtype, int] = {}
    send = dist.isend

    def count(tensor: Tensor, **where: Any) -> dist.Work | None:
        sent[tensor.dtype] = sent.get(tensor.dtype, 0) + tensor.nbytes
        return send(tensor, **where)

    with patch.object(dist, "isend", count):
        yield sent


@torch.inference_mode()
def stage_answers(links: StageLinks, sender: int) -> list[Tensor]:
    """What goes over the links of the rank's stage: LENGTHS residuals forward, and as many tokens back.

    sender: what is sent tells it. On two machines the ranks of a stage hold the same residuals.

    All are sent before any is taken, as far as there is room.
    """
    received = []
    for number, length in enumerate(LENGTHS):
        sent = make_residuals(length, number, sender)
        if links.after is not None and links.tokens_from_last is not None:
            links.tokens_from_last.post(length)
            links.after.send(sent)
            sent.zero_()  # what was sent can be written again
        if links.before is not None and links.tokens_to_first is not None:
            links.before.post(length)
            received.append(links.before.take().clone())
            links.before.release()
            links.tokens_to_first.send(torch.arange(length) + 10 * number + sender)
    if links.tokens_from_last is not None:
        assert links.tokens_from_last.is_full
        for _ in LENGTHS:
            received.append(links.tokens_from_last.take().clone())
            links.tokens_from_last.release()
    return received


def _file(folder: Path, size: int, rank: int) -> Path:
    return folder / f"{size}-{rank}"
