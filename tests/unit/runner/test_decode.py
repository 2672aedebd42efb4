"""Passes of decoding rows from the device's tables, captured and not: a runner with kernels, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.drivers.rows import VOCAB, Driver, Request, Row
from tests.drivers.thread_ranks import run_ranks
from tests.fakes.graphs import FakeGraphs
from tests.fakes.model import FakeAttention, FakeCache, FakeModel, logits_of
from toka_async.arrays import as_f32, as_i32, f32_column, i32_column
from toka_async.attention.base import PrefixGroup
from toka_async.attention.build import BuiltAttention
from toka_async.attention.choice import every_group_pays
from toka_async.kernels.sampling.kernels import SamplingKernels
from toka_async.messages import Ready, StepDone, TokenSampling
from toka_async.model.comm import Comm
from toka_async.runner import kernel_sampler
from toka_async.runner.graphs import list_graph_sizes
from toka_async.runner.runner import Runner, SamplingSetup
from toka_async.startup.synthetic import SyntheticRows

FAST = (
    TokenSampling(temperature=0),
    TokenSampling(),
    TokenSampling(temperature=0.9, repetition_penalty=1.4),
    TokenSampling(top_k=5),
)
COUNTED = TokenSampling(temperature=0.9, frequency_penalty=1.5)
FULL = {
    "counts": COUNTED,
    "all penalties": TokenSampling(presence_penalty=0.5, frequency_penalty=-0.2, repetition_penalty=1.3, top_p=0.9),
    "bias": TokenSampling(bias_ids=i32_column([3, 9]), bias_values=f32_column([2.0, -3.0]), repetition_penalty=0.8),
    "min_tokens": TokenSampling(temperature=0, min_tokens=40, end_ids=i32_column(range(0, VOCAB, 2))),
    "likeliest": TokenSampling(num_logprobs=3),
}
ALLOWED = TokenSampling(allowed_ids=i32_column([3, 5, 7]))
READY = Ready(num_pages=40, page_size=4, max_seqs=6, max_context=60, vocab_size=VOCAB, max_tokens=64)


def start(driver: Driver, samplings: tuple[TokenSampling, ...], most: int, grouped: bool = False) -> list[Row]:
    """Rows that decode from the next step on, and graphs of up to `most` rows."""
    rows = [driver.start(Request([1, 2, 3, 4, 5], sampling), seed) for seed, sampling in enumerate(samplings)]
    driver.step([100] * len(rows))
    assert driver.runner.decode is not None
    list(driver.runner.decode.capture(list_graph_sizes(most), int(grouped)))
    return [row for row in rows if row is not None]


def test_steps_of_decoding_rows_are_replayed(fake_graphs: FakeGraphs) -> None:
    driver = Driver(4, use_kernels=True)
    start(driver, FAST, 4)
    for num_steps in range(1, 8):
        driver.step()  # compares the tokens
        assert fake_graphs.num_replays() == num_steps


@pytest.mark.parametrize("sampling", [ALLOWED, FULL["all penalties"]], ids=["torch", "full"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_rows_replay_them_alike(fake_graphs: FakeGraphs, size: int, sampling: TokenSampling) -> None:
    """Rows come and go, so that they are another rank's; those of plain torch are sampled by every rank."""

    def play(comm: Comm) -> None:
        driver = Driver(4, use_kernels=True, comm=comm)
        rows = start(driver, FAST, 4)
        for _ in range(3):
            driver.step()  # compares the tokens
        driver.free(rows[1])
        driver.step()
        driver.start(Request([3, 1], sampling), 5)
        for lengths in ([100], [], [], []):
            driver.step(lengths)

    run_ranks(size, play)
    assert fake_graphs.num_replays() == 7 * size
    assert fake_graphs.num_replays("torch" if sampling is ALLOWED else "full") == 3 * size


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels that are interpreted need a machine without a GPU")
def test_real_kernels_sample_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_sampler, "SamplingKernels", partial(SamplingKernels, chunk=64))
    driver = Driver(4, use_kernels=True)
    for seed, sampling in enumerate((FAST[0], FAST[2], COUNTED, ALLOWED)):
        driver.start(Request([1, 2, 3, 4, 5], sampling), seed)
    driver.step([100] * 4)
    driver.step()  # compares the tokens


def test_steps_with_chunks_are_not(fake_graphs: FakeGraphs) -> None:
    driver = Driver(4, use_kernels=True)
    start(driver, FAST[:2], 4)
    driver.start(Request([*range(9)], FAST[1]), 7)
    replays = []
    for lengths in ([], [4], [5], []):
        driver.step(lengths)
        replays.append(fake_graphs.num_replays())
    assert replays == [1, 1, 1, 2]
    assert len(driver.order) == 3


def test_more_rows_than_the_largest_graph_are_not(fake_graphs: FakeGraphs) -> None:
    driver = Driver(4, use_kernels=True)
    first, *_ = start(driver, FAST, 3)
    driver.step()
    assert fake_graphs.num_replays() == 0
    driver.free(first)
    driver.step()
    assert fake_graphs.num_replays() == 1


def test_plain_torch_samples_after_a_replay(fake_graphs: FakeGraphs) -> None:
    driver = Driver(4, use_kernels=True)
    *_, limited = start(driver, (*FAST[:2], ALLOWED), 4)
    ends = []

    def step(lengths: tuple[int, ...] = ()) -> None:
        driver.step(lengths)  # compares the tokens
        ends.append((fake_graphs.num_replays("plain"), fake_graphs.num_replays("torch")))

    step()
    step()
    driver.free(limited)
    step()
    driver.start(Request([3, 1], FAST[1]), 5)  # in the slot of the limited one
    step((100,))
    step()
    assert ends == [(0, 1), (0, 2), (1, 2), (1, 2), (2, 2)]
    assert fake_graphs.num_replays() == 4


@pytest.mark.parametrize("kind", FULL)
def test_rows_that_are_edited_are_replayed(fake_graphs: FakeGraphs, kind: str) -> None:
    """Between others; again after a preemption, and forked."""
    driver = Driver(2, use_kernels=True)
    first, edited = start(driver, (FAST[0], FULL[kind]), 4)
    for _ in range(5):
        driver.step()  # compares the tokens
    assert fake_graphs.num_replays("full") == 5
    tokens = driver.free(edited)
    driver.step()
    driver.fork(first, 4)
    driver.start(edited.request, edited.seed, tokens[:-1])
    driver.step([100])
    for _ in range(3):
        driver.step()
    assert [fake_graphs.num_replays(name) for name in ("plain", "full", "torch")] == [1, 8, 0]


def test_min_tokens_ends_while_a_row_runs(fake_graphs: FakeGraphs) -> None:
    """Logits are edited until the last row has its tokens, the first of which came with the prompt."""
    driver = Driver(4, use_kernels=True)
    ends = i32_column(range(0, VOCAB, 2))
    start(driver, (FAST[1], *(TokenSampling(min_tokens=number, end_ids=ends) for number in (1, 3, 5))), 4)
    routes = []
    for _ in range(7):
        driver.step()  # compares the tokens
        routes.append((fake_graphs.num_replays("full"), fake_graphs.num_replays("plain")))
    assert routes == [(1, 0), (2, 0), (3, 0), (4, 0), (4, 1), (4, 2), (4, 3)]


def test_a_preempted_row_needs_the_rest_of_min_tokens(fake_graphs: FakeGraphs) -> None:
    driver = Driver(4, use_kernels=True)
    sampling = TokenSampling(min_tokens=4, end_ids=i32_column(range(0, VOCAB, 2)))
    (row,) = start(driver, (sampling,), 4)
    driver.step()
    tokens = driver.free(row)
    driver.start(row.request, row.seed, tokens)
    driver.step([100])  # its third token; one more is held
    for _ in range(3):
        driver.step()
    assert [fake_graphs.num_replays(name) for name in ("full", "plain")] == [2, 2]


def test_nothing_is_replayed_without_graphs(fake_graphs: FakeGraphs) -> None:
    driver = Driver(4, use_kernels=True)
    driver.start(Request([1, 2, 3], FAST[0]), 0)
    for _ in range(4):
        driver.step([100])
    assert driver.runner.decode is not None
    assert driver.runner.decode.count_padded(np.arange(3, dtype=np.int32)) == 3
    assert fake_graphs.graphs == []


def test_padding_writes_no_page_of_a_row(fake_graphs: FakeGraphs) -> None:
    """Three rows in a graph of four, for several pages of tokens, after a fourth has left."""
    driver = Driver(2, use_kernels=True)
    *rows, fourth = start(driver, FAST, 4)
    driver.step()
    driver.free(fourth)
    cache: FakeCache = driver.runner.cache  # type: ignore[assignment]
    before = cache.tokens[fourth.pages].copy()
    driver.free_pages = driver.free_pages[: -len(fourth.pages)]  # nobody else takes them
    for _ in range(9):
        driver.step()
    assert fake_graphs.num_replays() == 10
    written = {int(page) for page in np.flatnonzero((cache.tokens >= 0).any(1))}
    assert written - {page for row in (*rows, fourth) for page in row.pages} == {200}  # the scratch page
    assert (cache.tokens[200] >= 0).sum() == 1
    assert (cache.tokens[fourth.pages] == before).all()


def test_replays_keep_the_history(fake_graphs: FakeGraphs) -> None:
    """Other rows, whose penalties go by it, may find these pages in the cache."""
    driver = Driver(2, use_kernels=True)
    rows = start(driver, FAST[:2], 2)
    for _ in range(7):
        driver.step()
    assert fake_graphs.num_replays() == 7
    assert driver.runner._history is not None
    for row in rows:
        ids = driver.runner._history.ids[row.pages].flatten()
        assert ids[: row.computed].tolist() == row.tokens[: row.computed]


def make(use_kernels: bool, pays: Callable[[int, int], bool] = every_group_pays) -> tuple[Runner, FakeAttention]:
    cache, attention = FakeCache(READY.num_pages + 1, READY.page_size), FakeAttention()
    built = BuiltAttention(attention, attention if use_kernels else None, pays=pays)
    model, sampling = FakeModel(VOCAB, cache), SamplingSetup(kernels=use_kernels)
    return Runner(READY, torch.device("cpu"), model, cache, built, sampling), attention


def run(
    runner: Runner, samplings: tuple[TokenSampling, ...], num_shared: int = 0, num_grouped: int = 0
) -> list[StepDone]:
    """Rows of one step, then five steps of their tokens."""
    rows = SyntheticRows(READY, num_shared)
    lengths = [num_shared * READY.page_size + 3] * len(samplings)
    steps = [
        rows.make_step(lengths, samplings),
        *(rows.make_step(num_grouped=num_grouped) for _ in range(5)),
        rows.end(),
    ]
    return [runner.run(step) for step in steps][:-1]


def test_log_probs_of_replays(fake_graphs: FakeGraphs) -> None:
    asking = (
        TokenSampling(num_logprobs=0),
        TokenSampling(temperature=0),
        TokenSampling(temperature=0.5, num_logprobs=0),
    )
    replaying, plain = make(True)[0], make(False)[0]
    assert replaying.decode is not None
    list(replaying.decode.capture([1, 2, 4], 0))
    pairs = [*zip(run(replaying, asking), run(plain, asking), strict=True)]
    assert fake_graphs.num_replays() == 5
    for done, expected in pairs:
        assert as_i32(done.token_ids).tolist() == as_i32(expected.token_ids).tolist()
        np.testing.assert_allclose(as_f32(done.logprobs)[[0, 2]], as_f32(expected.logprobs)[[0, 2]], atol=1e-6)
    assert not any(done.logprobs for done in run(replaying, FAST[:3]))
    assert fake_graphs.num_replays() == 10


@pytest.mark.parametrize("num_silent", [0, 2])
def test_likeliest_tokens_of_replays(fake_graphs: FakeGraphs, num_silent: int) -> None:
    """Some rows ask for a few, beside rows that ask for none, one of which plain torch samples."""
    asking = (
        TokenSampling(num_logprobs=3, presence_penalty=1.0),
        TokenSampling(temperature=0, num_logprobs=1),
        *(TokenSampling(num_logprobs=0), TokenSampling(allowed_ids=i32_column([4, 9]), num_logprobs=2))[:num_silent],
    )
    replaying, plain = make(True)[0], make(False)[0]
    assert replaying.decode is not None
    list(replaying.decode.capture([1, 2, 4], 0))
    for done, expected in zip(run(replaying, asking), run(plain, asking), strict=True):
        for name in ("token_ids", "top_rows", "top_counts", "top_ids"):
            assert as_i32(getattr(done, name)).tolist() == as_i32(getattr(expected, name)).tolist()
        for name in ("logprobs", "top_logprobs"):
            np.testing.assert_allclose(as_f32(getattr(done, name)), as_f32(getattr(expected, name)), atol=1e-6)
    assert fake_graphs.num_replays("torch" if num_silent else "full") == 5


def test_results_outlive_the_next_replay(fake_graphs: FakeGraphs) -> None:
    """A launched step is collected after the next one was launched, which writes the same memory."""
    runner = make(True)[0]
    assert runner.decode is not None
    list(runner.decode.capture([1, 2], 0))
    rows = SyntheticRows(READY)
    launched = [
        runner.launch(step) for step in (rows.make_step([3, 3], FAST[:2]), *(rows.make_step() for _ in range(4)))
    ]
    tokens = [as_i32(step.collect().token_ids)[0] for step in launched]
    expected = [0, 0, 0]
    for _ in tokens:
        expected.append(int(logits_of(expected, VOCAB).argmax()))
    assert tokens == expected[3:]
    assert fake_graphs.num_replays() == 4


@pytest.mark.parametrize("grouped", [False, True])
def test_groups_need_graphs_of_their_own(fake_graphs: FakeGraphs, grouped: bool) -> None:
    runner, attention = make(True)
    assert runner.decode is not None
    list(runner.decode.capture([1, 2, 4], int(grouped)))
    run(runner, FAST[:3], num_shared=2, num_grouped=2)
    assert fake_graphs.num_replays() == (5 if grouped else 0)
    assert attention.groups == [(PrefixGroup(0, 2, 2),)] * (5 if grouped else 0)
    if not grouped:
        assert attention.batch.groups == (PrefixGroup(0, 2, 2),)


def test_groups_that_do_not_pay_are_computed_one_by_one(fake_graphs: FakeGraphs) -> None:
    """What the rank measured decides about each group, by its rows and the tokens that they share."""
    asked: list[tuple[int, int]] = []

    def pays(num_rows: int, num_tokens: int) -> bool:
        asked.append((num_rows, num_tokens))
        return len(asked) > 2

    runner, attention = make(True, pays)
    assert runner.decode is not None
    list(runner.decode.capture([1, 2, 4], 1))
    run(runner, FAST[:3], num_shared=2, num_grouped=2)
    assert asked == [(2, 2 * READY.page_size)] * 5
    assert attention.groups == [(PrefixGroup(0, 2, 2),)] * 3
    assert fake_graphs.num_replays() == 5


def test_a_capture_changes_nothing_but_padding(fake_graphs: FakeGraphs) -> None:
    """Before it, rows were there that have left; their slots and pages are nobody's business any more."""
    runner = make(True)[0]
    assert runner.decode is not None
    run(runner, FAST)
    tables = runner._rows.on_device
    assert runner._history is not None
    before = [tables.positions.clone(), tables.last_tokens[:-1].clone(), runner._history.ids[:-1].clone()]
    list(runner.decode.capture([1, 2, 4], 1))
    after = [tables.positions, tables.last_tokens[:-1], runner._history.ids[:-1]]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)
    assert len(fake_graphs.list_steps()) == 2 * 3  # of 1, 2 and 4 rows
