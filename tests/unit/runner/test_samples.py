"""Rows drawn by tensor ranks, each its share: the tokens, log-probs and seen bits of one rank that draws all."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from tests.drivers.sampler_bench import READY, VOCAB, Bench, identity, list_likeliest
from tests.drivers.thread_ranks import run_ranks
from tests.fakes.plain_kernels import PlainEditKernels, PlainKernels
from toka_async.arrays import i32_column
from toka_async.kernels.sampling.edit import EditKernels
from toka_async.kernels.sampling.kernels import SamplingKernels
from toka_async.messages import TokenSampling
from toka_async.model.comm import Comm, LocalComm
from toka_async.runner import kernel_sampler
from toka_async.runner.samples import Draws, pack_drawn

SAMPLINGS = {
    0: TokenSampling(temperature=0),
    5: TokenSampling(temperature=1.3, repetition_penalty=1.5),
    2: TokenSampling(temperature=0.8, top_p=0.6, num_logprobs=0),
    7: TokenSampling(temperature=0, repetition_penalty=3.0, num_logprobs=0),
    4: TokenSampling(top_k=7, min_p=0.01, temperature=0.9),
    1: TokenSampling(temperature=0.9, repetition_penalty=0.8, top_p=0.9),
}
EDITED = {3: TokenSampling(temperature=0.7, frequency_penalty=1.0, num_logprobs=3)}
LIMITED = {6: TokenSampling(allowed_ids=i32_column([4, 44, 7]), num_logprobs=2)}
# Which rows decode, in which order: a slot's row is another rank's from step to step.
ORDERS = [[0, 5, 2, 7, 4], [7, 1, 5], [5, 7], [5], [1, 5, 7, 2], [4, 7, 0, 1, 2, 5], [7, 5, 1]]
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks that are threads share one device")


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_sampler, "SamplingKernels", PlainKernels)
    monkeypatch.setattr(kernel_sampler, "EditKernels", PlainEditKernels)


def play(
    orders: list[list[int]], samplings: dict[int, TokenSampling], comm: Comm | None = None
) -> tuple[Bench, list[Draws]]:
    """The rows' steps, on one rank or by one of several."""
    bench = Bench(CPU, comm)
    bench.admit(samplings)
    samples = []
    for number, order in enumerate(orders):
        logits = 2 * torch.randn(len(order), VOCAB, generator=torch.Generator().manual_seed(number))
        samples.append(bench.sample_by_kernels(order, logits))
    return bench, samples


def check_equal(samples: Draws, expected: Draws) -> None:
    assert samples.token_ids.tolist() == expected.token_ids.tolist()
    assert (samples.chosen is None) == (expected.chosen is None)
    if samples.chosen is not None and expected.chosen is not None:
        assert torch.equal(samples.chosen, expected.chosen)
    assert list_likeliest(samples) == list_likeliest(expected)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_draw_what_one_does(size: int) -> None:
    check_ranks(size, ORDERS, SAMPLINGS)


def test_real_kernels_draw_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_sampler, "SamplingKernels", partial(SamplingKernels, chunk=64))
    monkeypatch.setattr(kernel_sampler, "EditKernels", EditKernels)
    check_ranks(2, [*ORDERS[:2], [5, 7, 3]], SAMPLINGS | EDITED)


def test_edited_rows_are_among_them() -> None:
    check_ranks(2, [[3, 5, 7], [3], [5, 3, 0, 7, 1]], SAMPLINGS | EDITED)


def test_every_rank_draws_the_rows_of_plain_torch() -> None:
    check_ranks(2, [[3, 5, 6], [6], [5, 6, 0, 7, 1], [6, 3]], SAMPLINGS | EDITED | LIMITED)


def check_ranks(size: int, orders: list[list[int]], samplings: dict[int, TokenSampling]) -> None:
    """Every rank's samples and seen bits are those of one rank."""
    alone, expected = play(orders, samplings)
    for bench, steps in run_ranks(size, partial(play, orders, samplings)):
        for samples, of_one in zip(steps, expected, strict=True):
            check_equal(samples, of_one)
        assert torch.equal(bench.kernels._table.seen, alone.kernels._table.seen)
        assert not bench.kernels._table.seen[READY.max_seqs].any()  # the padding's


def test_a_rank_gets_all_ids_of_its_rows_alone() -> None:
    """Ids that pad the vocabulary are left out, and rows lie equally far apart, however many they are."""

    def logits_of(comm: Comm) -> list[torch.Tensor]:
        head = identity(comm, CPU)
        return [head.own_logits(hidden[: comm.size * num]) for num in (1, 2, 5)]

    hidden = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(0))
    for rank, parts in enumerate(run_ranks(4, logits_of)):
        for num, logits in zip((1, 2, 5), parts, strict=True):
            assert torch.equal(logits, hidden[rank * num : (rank + 1) * num])
            assert logits.stride() == (92, 1)  # 4 parts of 23
            assert logits.data_ptr() % 16 == 0
    assert torch.equal(identity(LocalComm(), CPU).own_logits(hidden), hidden)


def test_a_rank_receives_its_share_of_the_logits() -> None:
    """Not those of all rows: the logits of its rows, and two numbers a row of what the others drew."""

    def sent(comm: Comm) -> int:
        play([[0, 5, 2, 4]], SAMPLINGS, comm)
        num_values: int = comm.num_values  # type: ignore[attr-defined]
        return num_values

    assert run_ranks(2, sent) == [4 * VOCAB // 2 + 2 * 2] * 2


def test_what_was_drawn_is_packed_into_one_memory() -> None:
    """As tensor ranks gather it: likeliest tokens are columns."""
    logprobs, top_ids = torch.tensor([-0.5, -torch.inf]), torch.arange(6, dtype=torch.int32).view(3, 2).t()
    top_values = -torch.arange(6.0).view(3, 2).t()
    packed = pack_drawn((torch.tensor([7, 2**31 - 1]), logprobs, top_ids, top_values))
    assert packed[0].dtype == torch.int32
    assert packed[0].tolist() == [7, 2**31 - 1]
    assert all(torch.equal(own, other) for own, other in zip(packed[1:], (logprobs, top_ids, top_values), strict=True))
    assert len({part.untyped_storage().data_ptr() for part in packed}) == 1
    assert all(part.is_contiguous() for part in packed)
