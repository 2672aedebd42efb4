from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.drivers.thread_ranks import run_ranks
from tests.fakes.graphs import FakeGraphs
from tests.fakes.model import FakeAttention, FakeCache, FakeModel
from toka_async.attention.build import BuiltAttention
from toka_async.messages import Ready
from toka_async.model.comm import Comm
from toka_async.runner.decode import DecodePass
from toka_async.runner.runner import Runner, SamplingSetup
from toka_async.tuning.graph_sizes import GraphChoice, find_kept
from toka_async.tuning.settle import settle
from toka_async.tuning.store import TuningCache

READY = Ready(num_pages=40, page_size=4, max_seqs=16, max_context=60, vocab_size=50, max_tokens=64)
TIMED = 4  # replays of a graph that is timed


def make_decode() -> DecodePass:
    cache, attention = FakeCache(READY.num_pages + 1, READY.page_size), FakeAttention()
    built, sampling = BuiltAttention(attention, attention), SamplingSetup(kernels=True)
    runner = Runner(READY, torch.device("cpu"), FakeModel(READY.vocab_size, cache), cache, built, sampling)
    assert runner.decode is not None
    return runner.decode


def choice_of(decode: DecodePass | None = None, **changed: Any) -> GraphChoice:
    values: dict[str, Any] = {"most": 8, "grouped": True, "model": {"model": "tiny"}, "show": lambda *_: None}
    return GraphChoice(decode or make_decode(), **values | changed)


def sizes_of(decode: DecodePass) -> list[int]:
    assert decode.graphs is not None
    return decode.graphs.sizes


def test_graphs_that_a_larger_one_beats_are_left_out(fake_graphs: FakeGraphs) -> None:
    shown: list[tuple[int, int]] = []
    choice = choice_of(show=lambda *progress: shown.append(progress))
    fake_graphs.slow = {4: 4.5, 1: 0.5}
    assert choice.measure() == [1, 2, 8]
    assert shown == [(done, 8) for done in range(1, 9)]
    assert [graph.num_replays for graph in fake_graphs.list_steps()] == [TIMED] * 8
    assert fake_graphs.num_replays("plain") == TIMED * 8
    assert sizes_of(choice.decode) == [1, 2, 4, 8]
    choice.use([1, 2, 8])
    assert sizes_of(choice.decode) == [1, 2, 8]
    assert len(fake_graphs.list_steps()) == 8


def test_sizes_that_are_known_are_captured_alone(fake_graphs: FakeGraphs) -> None:
    """Without a look at the clock: one is slower than the next, and stays."""
    fake_graphs.slow = {2: 9.0}
    choice = choice_of(grouped=False)
    choice.use([2, 8])
    assert sizes_of(choice.decode) == [2, 8]
    assert fake_graphs.num_replays() == 0


@pytest.mark.usefixtures("fake_graphs")
def test_a_later_start_knows_them(tmp_path: Path) -> None:
    first, second = choice_of(), choice_of()
    assert settle(first, TuningCache(tmp_path, {})) == [1, 2, 4, 8]
    assert settle(second, TuningCache(tmp_path, {})) == [1, 2, 4, 8]
    assert first.decode.graphs is not None
    assert second.decode.graphs is None  # nothing was captured to find out


@pytest.mark.parametrize(
    "kept", [[1, 4], [1, 3, 8], [0, 8], [-1, 8], [8, 16], [10**30], [], [8, 4, 1], [1, 4, 4, 8]], ids=str
)
@pytest.mark.usefixtures("plain_kernels")
def test_sizes_that_cannot_be_are_not_admitted(kept: list[int]) -> None:
    assert choice_of().admits([1, 4, 8])
    assert not choice_of().admits(kept)


@pytest.mark.usefixtures("plain_kernels")
def test_what_the_times_depend_on() -> None:
    assert choice_of().describe() == {"model": "tiny", "graphs": [8, True]}
    others: list[dict[str, Any]] = [{"most": 4}, {"grouped": False}, {"model": {}}]
    assert all(choice_of(**changed).describe() != choice_of().describe() for changed in others)


def test_ranks_leave_out_the_same(fake_graphs: FakeGraphs) -> None:
    """What the first one measures."""

    def rank(comm: Comm) -> list[int]:
        def show(*_: int) -> None:
            fake_graphs.slow = {4: 9.0} if comm.rank == 0 else {2: 9.0}

        choice = choice_of(show=show)
        choice.use(settle(choice, TuningCache(None, {}), comm))
        return sizes_of(choice.decode)

    assert run_ranks(2, rank) == [[1, 2, 8]] * 2


def test_each_kept_size_beats_all_larger_ones() -> None:
    assert find_kept([1, 2, 4, 8], [3.0, 3.0, 2.0, 4.0]) == [4, 8]
    assert find_kept([], []) == []
