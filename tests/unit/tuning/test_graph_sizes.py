from __future__ import annotations

from collections.abc import Callable
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
from toka_async.tuning import graph_sizes
from toka_async.tuning.clock import HEAD_START
from toka_async.tuning.graph_sizes import GraphChoice, GraphLimit, find_kept
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
    values: dict[str, Any] = {"most": 8, "least_grouped": 1, "model": {"model": "tiny"}, "show": lambda *_: None}
    return GraphChoice(decode or make_decode(), **values | changed)


def sizes_of(decode: DecodePass) -> list[int]:
    assert decode.graphs is not None
    return decode.graphs.sizes


def test_graphs_that_a_larger_one_beats_are_left_out(fake_graphs: FakeGraphs) -> None:
    shown: list[tuple[int, int, str]] = []
    choice = choice_of(show=lambda *progress: shown.append(progress))
    fake_graphs.slow = {4: 4.5, 1: 0.5}
    assert choice.measure() == [1, 2, 8]
    assert shown == [(done, 8, "graphs captured") for done in range(1, 9)]
    assert [graph.num_replays for graph in fake_graphs.list_steps()] == [TIMED] * 8
    assert fake_graphs.num_replays("plain") == TIMED * 8
    assert sizes_of(choice.decode) == [1, 2, 4, 8]
    choice.use([1, 2, 8])
    assert sizes_of(choice.decode) == [1, 2, 8]
    assert len(fake_graphs.list_steps()) == 8


def test_sizes_with_groups_are_compared_with_those_without(fake_graphs: FakeGraphs) -> None:
    """Fewer graphs of a size do not make it faster."""
    fake_graphs.slow = {2: 2.5}
    assert choice_of(least_grouped=4).measure() == [1, 4, 8]
    assert len(fake_graphs.list_steps()) == 6


def test_sizes_that_are_known_are_captured_alone(fake_graphs: FakeGraphs) -> None:
    """Without a look at the clock: one is slower than the next, and stays."""
    fake_graphs.slow = {2: 9.0}
    choice = choice_of(least_grouped=0)
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
    assert choice_of().describe() == {"model": "tiny", "graphs": [8, 1]}
    others: list[dict[str, Any]] = [{"most": 4}, {"least_grouped": 4}, {"model": {}}]
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


class HostClock:
    """Plays the times of launching steps: the host's is the same for all, the device's grows with the rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: float, of_a_row: float) -> None:
        self.sizes: list[int] = []
        self.host, self.of_a_row = host, of_a_row
        monkeypatch.setattr(DecodePass, "fill", self.fill)
        monkeypatch.setattr(DecodePass, "compute_padding", lambda _, num_rows: self.sizes.append(num_rows))
        monkeypatch.setattr(graph_sizes, "time_host", self.time_host)
        monkeypatch.setattr(graph_sizes, "time_calls", self.time_device)

    def fill(self, most: int) -> None:
        self.most = most

    def time_host(self, step: Callable[[], None]) -> float:
        step()
        return self.host

    def time_device(self, step: Callable[[], None], head_start: int) -> float:
        assert head_start * HEAD_START >= 2e9 * self.host  # cycles: all is launched before the device begins
        step()
        return 1000 * self.of_a_row * self.sizes[-1]


@pytest.mark.parametrize(
    ("of_a_row", "expected"), [(1e-5, 896), (2e-5, 512), (1e-7, 2048)], ids=["some", "none", "all"]
)
def test_steps_are_captured_up_to_where_the_device_is_slower_than_the_host(
    monkeypatch: pytest.MonkeyPatch, of_a_row: float, expected: int
) -> None:
    clock = HostClock(monkeypatch, host=0.009, of_a_row=of_a_row)
    limit = GraphLimit(make_decode(), 2048, {})
    assert limit.measure() == expected
    assert limit.admits(expected)
    assert set(clock.sizes) == {640, 768, 896, 1024, 1280, 1536, 1792, 2048}  # whatever the times are


@pytest.mark.usefixtures("plain_kernels")
def test_limits_that_cannot_be_are_not_admitted() -> None:
    limit = GraphLimit(make_decode(), 1000, {"model": "tiny"})
    assert limit.describe() == {"model": "tiny", "graph_rows": 1000}
    assert [size for size in (0, 256, 512, 640, 700, 1000, 1024) if limit.admits(size)] == [512, 640, 1000]


@pytest.mark.usefixtures("plain_kernels")
def test_padding_is_computed_without_graphs() -> None:
    decode = make_decode()
    decode.fill(8)
    with torch.inference_mode():
        decode.compute_padding(8)
    rows = decode._rows.on_device
    assert not rows.positions.any()  # padding stays where it is


def test_each_kept_size_beats_all_larger_ones() -> None:
    assert find_kept([1, 2, 4, 8], [3.0, 3.0, 2.0, 4.0]) == [4, 8]
    assert find_kept([], []) == []
