from __future__ import annotations

import torch
from torch import Tensor

from tests.drivers.thread_ranks import run_ranks
from toka_async.model.comm import Comm
from toka_async.model.ordered_sums import OrderedSums


def test_sums_are_in_the_order_of_ranks_and_rounded_once() -> None:
    """Two large numbers cancel before the small ones come; bfloat16 sums in between would lose those."""
    parts = torch.tensor([2.0**20, -(2.0**20), 1.0, 2.0**-9]).to(torch.bfloat16)

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        sums = OrderedSums(comm)
        assert (sums.rank, sums.size) == (comm.rank, 4)
        own = parts[comm.rank].expand(8, 3).contiguous()
        return sums.all_reduce(own.clone()), sums.reduce_scatter(own.clone())

    expected = (((parts[0].float() + parts[1].float()) + parts[2].float()) + parts[3].float()).to(torch.bfloat16)
    for whole, own in run_ranks(4, rank):
        assert torch.equal(whole, expected.expand(8, 3))
        assert torch.equal(own, expected.expand(2, 3))


def test_the_rest_is_what_the_ranks_do() -> None:
    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        sums = OrderedSums(comm)
        own = torch.tensor([[10.0 * comm.rank], [10.0 * comm.rank + 1]])
        return sums.all_gather(own, 1), sums.all_to_all(own)

    answers = run_ranks(2, rank)
    assert all(torch.equal(gathered, torch.tensor([[0.0, 10.0], [1.0, 11.0]])) for gathered, _ in answers)
    assert [exchanged.flatten().tolist() for _, exchanged in answers] == [[0.0, 10.0], [1.0, 11.0]]
