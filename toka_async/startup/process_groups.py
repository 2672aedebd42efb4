"""Connects the ranks of one model: who computes which part, and how they reach each other.

All ranks make all groups in the same order, as torch.distributed demands. Knows no weights and no steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toka_async.model.comm import TIMEOUT, Comm, DistributedComm, LocalComm, join
from toka_async.runner.links import Receiver, Sender, StageLinks, count_own_rows
from toka_async.startup.rank_coords import RankCoords

IN_FLIGHT = 2  # residuals that a link holds: one is computed with while the next is received
# Thread blocks of a link's kernels, which wait beside computing kernels. NVLink needs few.
MOST_BLOCKS = 4


@dataclass(slots=True, frozen=True)
class ProcessGroups:
    """world: all ranks of the model. tensor: those of this rank's stage. pairs: links, once they have buffers."""

    world: Comm
    tensor: Comm
    pairs: StagePairs | None


@dataclass(slots=True, frozen=True)
class StagePairs:
    """This rank's groups of two; None where it has none. `forward` ones carry residuals, `back` ones sampled tokens."""

    place: RankCoords
    device: torch.device
    before: dist.ProcessGroup | None
    after: dist.ProcessGroup | None
    back: dist.ProcessGroup | None


def make_groups(place: RankCoords, device: torch.device) -> ProcessGroups:
    """Waits for all ranks, and makes their groups. Raises RuntimeError when the others do not come in time."""
    world = join(place.group, place.world_rank, place.world_size, device, place.group_fd)
    if place.num_stages == 1:
        return ProcessGroups(world, world, None)
    tensor: Comm = LocalComm()
    if place.size > 1:
        for stage in range(place.num_stages):
            group = dist.new_group([stage * place.size + rank for rank in range(place.size)], timeout=TIMEOUT)
            if stage == place.stage:
                tensor = DistributedComm(group, device)
    return ProcessGroups(world, tensor, make_pairs(place, device))


def make_pairs(place: RankCoords, device: torch.device) -> StagePairs:
    """Makes all groups of two, and returns those of this rank of torch's world."""
    mine: dict[str, dist.ProcessGroup] = {}
    last = place.num_stages - 1
    ways = [(stage, stage + 1) for stage in range(last)] + [(last, 0)]
    for source, target in ways:
        for rank in range(place.size):
            ranks = [source * place.size + rank, target * place.size + rank]
            # In the order of ranks, whatever order they are given in: see `build_links`.
            group = dist.new_group(sorted(ranks), timeout=TIMEOUT, pg_options=_make_options(device))
            if place.world_rank not in ranks:
                continue
            name = "back" if source > target else "after" if place.stage == source else "before"
            mine[name] = group
    return StagePairs(place, device, mine.get("before"), mine.get("after"), mine.get("back"))


def _make_options(device: torch.device) -> Any:
    """Makes NCCL's options for groups that only send: few thread blocks, which run as soon as they can."""
    if device.type != "cuda":
        return None
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    options.is_high_priority_stream = True
    options.config.max_ctas = MOST_BLOCKS
    return options


def build_links(
    pairs: StagePairs, tensor: Comm, size: int, dtype: torch.dtype, num_tokens: int, num_rows: int
) -> StageLinks:
    """Builds links with their buffers, and sends something on each: groups connect at their first use.

    tensor: the ranks of this stage. size: of what a token passes on. num_tokens: of a micro-batch at most. num_rows:
    that one samples at most.
    """
    place, device = pairs.place, pairs.device
    local = LocalComm()

    def choose_comm(other_stage: int) -> Comm:
        return local if place.find_node(other_stage) == place.find_node(place.stage) else tensor

    def make_residuals(comm: Comm) -> list[Tensor]:
        num_own = count_own_rows(num_tokens, comm)
        return [torch.zeros(num_own, size, dtype=dtype, device=device) for _ in range(IN_FLIGHT)]

    def make_tokens() -> list[Tensor]:
        # As many as are under way while the first stage computes the next.
        count = 2 * place.num_micro_batches + place.num_stages
        return [torch.zeros(num_rows, dtype=torch.int64, device=device) for _ in range(count)]

    is_first, is_last = place.stage == 0, place.stage == place.num_stages - 1
    before, after = choose_comm(place.stage - 1), choose_comm(place.stage + 1)
    with torch.inference_mode():
        links = StageLinks(
            before=Receiver(pairs.before, 0, make_residuals(before), before) if pairs.before is not None else None,
            after=Sender(pairs.after, 1, make_residuals(after), after) if pairs.after is not None else None,
            tokens_from_last=Receiver(pairs.back, 1, make_tokens()) if pairs.back is not None and is_first else None,
            tokens_to_first=Sender(pairs.back, 0, make_tokens()) if pairs.back is not None and is_last else None,
        )
        _try(links, torch.zeros(1, size, dtype=dtype, device=device))
    return links


def _try(links: StageLinks, residual: Tensor) -> None:
    """Sends something through each link, stage after stage: a first use may wait for the other end."""
    if links.before is not None:
        links.before.post(1)
        links.before.discard()
    if links.after is not None:
        links.after.send(residual)
    if links.tokens_to_first is not None:
        links.tokens_to_first.send(torch.zeros(1, dtype=torch.int64, device=residual.device))
    if links.tokens_from_last is not None:
        links.tokens_from_last.post(1)
        links.tokens_from_last.discard()
