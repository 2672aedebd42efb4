"""Graphs of decoding steps, with CUDA's part of it played on the CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fakes.graphs import FakeGraphs
from tests.fakes.model import FakeAttention
from toka_async.attention.base import PrefixGroup
from toka_async.runner.graphs import DENSE_ROWS, DecodeGraphs, list_graph_sizes

GROUP = (PrefixGroup(0, 2, 1),)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 9, 12, 13, 100, 512, 700, 8192])
def test_sizes_leave_little_padding(most: int) -> None:
    sizes = list_graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for num_rows in range(1, most + 1):
        size = next(size for size in sizes if size >= num_rows)
        assert size < 2 * num_rows
    assert len(sizes) <= 4 * most.bit_length()


def test_large_sizes_are_few() -> None:
    """Each takes time at the start."""
    large = [size for size in list_graph_sizes(4096) if size > DENSE_ROWS]
    assert large == [640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096]


class Graphs:
    """Captured graphs of a step that counts its calls; its tokens are their rows' numbers and the count's."""

    def __init__(self, fake: FakeGraphs, sizes: list[int], least_grouped: int, ends: Sequence[str] = ()) -> None:
        self.fake = fake
        self.ended: list[str] = []
        self.calls: list[tuple[int, bool]] = []
        self.attention = FakeAttention()
        all_ends = {end: [fake.capturable(partial(self.go_on, link), link) for link in end.split("+")] for end in ends}
        self.graphs = DecodeGraphs(fake.capturable(self.decode), all_ends, self.attention, sizes, least_grouped)

    def capture(self) -> DecodeGraphs:
        """Captures all; what is called afterwards is called by replays."""
        list(self.graphs.capture())
        self.calls.clear()
        self.ended.clear()
        return self.graphs

    def decode(self, num_rows: int, grouped: bool) -> tuple[Tensor, Tensor]:
        self.calls.append((num_rows, grouped))
        return torch.arange(num_rows) + 100 * len(self.calls), torch.full((num_rows,), -1.0)

    def go_on(self, name: str, outputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        self.ended.append(name)
        return (outputs[0] + len(name),)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    return FakeGraphs(monkeypatch)


def test_nothing_can_be_replayed_before_the_capture(fake: FakeGraphs) -> None:
    graphs = Graphs(fake, [1, 2, 4], 0).graphs
    assert graphs.find_size(1) == 0
    assert not graphs.has(1, grouped=False)


@pytest.mark.parametrize("grouped", [False, True])
def test_the_largest_is_captured_first_and_each_after_a_run_of_its_own(fake: FakeGraphs, grouped: bool) -> None:
    graphs = Graphs(fake, [2, 1, 4], int(grouped))
    kinds = (False, True) if grouped else (False,)
    expected = [(size, kind) for size in (4, 2, 1) for kind in kinds for _ in ("computed", "captured")]
    progress = [*graphs.graphs.capture()]
    assert progress == [(done, 3 * len(kinds)) for done in range(1, 3 * len(kinds) + 1)]
    assert graphs.calls == expected
    assert len(fake.graphs) == 3 * len(kinds)
    assert fake.num_collections == 1 + 3 * len(kinds)  # before them all, and before each
    assert gc.isenabled()


def test_the_smallest_graph_that_holds_the_rows(fake: FakeGraphs) -> None:
    graphs = Graphs(fake, [1, 2, 4], 0).graphs
    list(graphs.capture())
    assert [graphs.find_size(num_rows) for num_rows in range(1, 6)] == [1, 2, 4, 4, 0]
    assert [graphs.has(num_rows, grouped=False) for num_rows in range(1, 6)] == [True] * 4 + [False]
    assert not any(graphs.has(num_rows, grouped=True) for num_rows in range(1, 6))


def test_few_rows_have_no_groups(fake: FakeGraphs) -> None:
    graphs = Graphs(fake, [1, 2, 4, 8], 3)
    assert [*graphs.graphs.capture()][-1] == (6, 6)
    assert [size for size, grouped in graphs.calls[::2] if grouped] == [8, 4]
    assert [num_rows for num_rows in range(1, 9) if graphs.graphs.has(num_rows, grouped=True)] == [3, 4, 5, 6, 7, 8]
    assert all(graphs.graphs.has(num_rows, grouped=False) for num_rows in range(1, 9))
    assert [len(graphs.graphs.list_replays(size)) for size in graphs.graphs.sizes] == [1, 1, 2, 2]


def test_a_replay_gives_the_rows_without_padding(fake: FakeGraphs) -> None:
    graphs = Graphs(fake, [1, 2, 4], 1)
    graphs.capture()
    first, logprobs = graphs.graphs.replay(3, ())
    assert (first.tolist(), logprobs.tolist()) == ([100, 101, 102], [-1.0] * 3)
    kept = first.clone()
    second, _ = graphs.graphs.replay(2, ())
    assert second.tolist() == [200, 201]
    assert torch.equal(first, kept)  # of another graph
    third, _ = graphs.graphs.replay(4, ())
    assert third.tolist() == [300, 301, 302, 303]
    assert first.tolist() == [300, 301, 302]  # the same memory again
    assert graphs.calls == [(4, False), (2, False), (4, False)]


def test_a_step_goes_on_with_the_end_that_is_asked_for(fake: FakeGraphs) -> None:
    graphs = Graphs(fake, [1, 2], 1, ends=["long", "end"])
    graphs.capture()
    assert [graph.name for graph in fake.graphs] == ["step", "long", "end"] * 4
    assert graphs.graphs.replay(2, (), "long")[0].tolist() == [104, 105]
    assert graphs.graphs.replay(1, GROUP, "end")[0].tolist() == [203]
    assert graphs.calls == [(2, False), (1, True)]
    assert graphs.ended == ["long", "end"]
    for replay in graphs.graphs.list_replays(2):
        replay()
    assert graphs.calls[2:] == [(2, False), (2, True)]
    assert graphs.ended[2:] == ["long", "long"]


def test_something_can_be_done_before_the_last_link_of_an_end(fake: FakeGraphs) -> None:
    graphs = Graphs(fake, [2], 0, ends=["end", "first+last"])
    graphs.capture()
    assert [graph.name for graph in fake.graphs] == ["step", "end", "first", "last"]
    assert graphs.graphs.replay(2, (), "first+last", lambda: graphs.ended.append("between"))[0].tolist() == [109, 110]
    assert graphs.graphs.replay(1, (), "end", lambda: graphs.ended.append("between"))[0].tolist() == [203]
    assert graphs.ended == ["first", "between", "last", "between", "end"]


def test_every_kept_graph_is_launched_once(fake: FakeGraphs) -> None:
    graphs = Graphs(fake, [1, 2, 4], 1, ends=["long", "begin+end"])
    list(graphs.graphs.capture())
    graphs.graphs.keep([1, 4])
    graphs.graphs.launch()
    # Of 4, 2 and 1 rows, without groups and with them: the step and its ends.
    assert [graph.num_replays for graph in fake.graphs] == [1] * 8 + [0] * 8 + [1] * 8


def test_groups_are_set_before_a_replay_that_has_any(fake: FakeGraphs) -> None:
    graphs = Graphs(fake, [1, 2, 4], 1)
    graphs.capture()
    assert graphs.graphs.has(3, grouped=True)
    graphs.graphs.replay(3, GROUP)
    assert graphs.attention.groups == [GROUP]
    graphs.graphs.replay(3, ())
    assert graphs.attention.groups == [GROUP]
    assert graphs.calls == [(4, True), (4, False)]


def test_collections_wait_for_all_captures(fake: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    collecting: list[bool] = []
    graphs = Graphs(fake, [2, 4], 0)
    capturable = fake.capturable(graphs.decode)

    def decode(num_rows: int, grouped: bool) -> tuple[Tensor, ...]:
        collecting.append(gc.isenabled())
        return capturable(num_rows, grouped)

    monkeypatch.setattr(graphs.graphs, "_decode", decode)
    list(graphs.graphs.capture())
    assert collecting == [False] * 4
    assert gc.isenabled()


@pytest.mark.usefixtures("fake")
def test_a_failed_capture_lets_collections_go_on() -> None:
    def decode(num_rows: int, grouped: bool, calls: list[int]) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        calls.append(num_rows)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return torch.from_numpy(np.zeros(num_rows)), torch.zeros(num_rows)

    graphs = DecodeGraphs(partial(decode, calls=[]), {}, FakeAttention(), [1], 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(graphs.capture())
    assert gc.isenabled()
    assert not graphs.has(1, grouped=False)


def test_graphs_of_other_sizes_are_dropped(fake: FakeGraphs) -> None:
    graphs = Graphs(fake, [1, 2, 4, 8], 1).graphs
    assert graphs.sizes == []
    list(graphs.capture())
    assert graphs.sizes == [1, 2, 4, 8]
    assert [len(graphs.list_replays(size)) for size in graphs.sizes] == [2] * 4
    dropped = weakref.ref(fake.graphs[2])  # of four rows, captured after those of eight
    graphs.keep([1, 2, 8])
    assert graphs.sizes == [1, 2, 8]
    assert [graphs.find_size(num_rows) for num_rows in range(1, 10)] == [1, 2, 8, 8, 8, 8, 8, 8, 0]
    assert all(graphs.has(num_rows, grouped) for num_rows in range(1, 9) for grouped in (False, True))
    fake.graphs.clear()
    assert dropped() is not None, "its end would take memory from the others"
