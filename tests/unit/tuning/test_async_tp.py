from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from tests.cases.models import make_checkpoint
from tests.drivers.thread_ranks import run_ranks
from toka_async.bar import show_nothing
from toka_async.checkpoint.spec import read_spec
from toka_async.model.activation_layout import LayoutPolicy, Replicated, SequenceSharded
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.decoder import Decoder
from toka_async.model.matrices.ops import TorchOps
from toka_async.tuning import async_tp
from toka_async.tuning.async_tp import (
    LayerRun,
    LayoutTimes,
    RankShape,
    Timing,
    build_layouts,
    count_workspace_bytes,
    find_least_tokens,
    list_token_counts,
)
from toka_async.tuning.store import TuningCache

NONE = TuningCache(None, {})


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> RankShape:
    spec = read_spec(make_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_key_value_heads=2))
    return RankShape(spec, torch.float32, torch.device("cpu"), TorchOps(), max_tokens=2100)


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks could overlap; the bytes that they reserve, negative when they give them back."""
    bytes_taken: list[int] = []

    def reserve(_: Comm, num_bytes: int) -> str:
        bytes_taken.append(num_bytes)
        return ""

    monkeypatch.setattr(async_tp, "explain_obstacle", lambda *_: "")
    monkeypatch.setattr(async_tp, "reserve", reserve)
    monkeypatch.setattr(async_tp, "release", lambda _: bytes_taken.append(-1))
    monkeypatch.setattr(async_tp, "build_overlapped", SequenceSharded)
    return bytes_taken


def test_one_rank_has_no_shards(shape: RankShape) -> None:
    assert build_layouts("auto", LocalComm(), shape, 0, NONE).shards is None


def test_none_are_wanted(shape: RankShape, overlapping: list[int]) -> None:
    built = run_ranks(2, lambda comm: build_layouts(0, comm, shape, 0, NONE))
    assert [(ways.shards, ways.min_tokens) for ways in built] == [(None, 0)] * 2
    assert overlapping == []


def test_a_number_is_taken_as_it_is(shape: RankShape, overlapping: list[int]) -> None:
    for ways in run_ranks(2, lambda comm: build_layouts(7, comm, shape, 512, NONE)):
        assert isinstance(ways.choose(7), SequenceSharded)
        assert isinstance(ways.choose(6), Replicated)
    assert overlapping == [2 * 1050 * shape.spec.hidden_size * 4] * 2


@pytest.mark.parametrize("size", [2, 4])
def test_in_shards_each_rank_has_two_tokens(shape: RankShape, overlapping: list[int], size: int) -> None:
    for ways in run_ranks(size, lambda comm: build_layouts(1, comm, shape, 0, NONE)):
        assert isinstance(ways.choose(size + 1), SequenceSharded)
        assert isinstance(ways.choose(size), Replicated)
        assert ways.min_tokens == size + 1
    assert len(overlapping) == size


def test_without_overlap_a_number_stands_and_auto_is_never(shape: RankShape, caplog: pytest.LogCaptureFixture) -> None:
    """On a CPU, for one; rank 0 says why."""
    with caplog.at_level(logging.INFO):
        asked = run_ranks(2, lambda comm: build_layouts(7, comm, shape, 0, NONE))
        auto = run_ranks(2, lambda comm: build_layouts("auto", comm, shape, 0, NONE))
    assert [isinstance(ways.choose(7), SequenceSharded) for ways in asked] == [True, True]
    assert [ways.shards for ways in auto] == [None, None]
    assert [record.getMessage() for record in caplog.records] == [
        "parallel.async_tp_min_tokens=7: steps from 7 tokens on are in shards, but nothing overlaps: it needs GPUs",
        "async TP: never: it needs GPUs",
    ]


@pytest.mark.usefixtures("overlapping")
def test_auto_is_what_rank_0_measures(shape: RankShape, caplog: pytest.LogCaptureFixture) -> None:
    def measured(comm: Comm) -> LayoutPolicy:
        runs: list[tuple[int, bool]] = []

        def clock(run: LayerRun) -> float:
            run()
            in_shards = isinstance(run.layout, SequenceSharded)
            runs.append((run.num_tokens, in_shards))
            gain = 1.5 if run.num_tokens >= 2048 and comm.rank == 0 else 0.9
            return run.num_tokens / gain / 64 if in_shards else run.num_tokens / 64

        ways = build_layouts("auto", comm, shape, 512, NONE, clock=clock)
        assert runs == [(count, which) for count in (1024, 2048) for _ in range(3) for which in (False, True)]
        return ways

    with caplog.at_level(logging.INFO):
        assert [ways.min_tokens for ways in run_ranks(2, measured)] == [2048, 2048]
    (record,) = caplog.records
    assert record.getMessage() == (
        "async TP: from 2048 tokens a step; ms of a layer by tokens, without and with: "
        "1024: 2.000 2.222, 2048: 4.000 2.667"
    )


@pytest.mark.usefixtures("overlapping")
def test_what_is_measured_is_tuned_before(shape: RankShape) -> None:
    def measured(comm: Comm) -> list[object]:
        events: list[object] = []

        def tune(decoder: Decoder, counts: Sequence[int]) -> None:
            events.append((len(decoder.layers), list(counts)))

        def clock(run: LayerRun) -> float:
            events.append(run.num_tokens)
            return 1.0

        build_layouts("auto", comm, shape, 512, NONE, tune=tune, clock=clock)
        return events

    for events in run_ranks(2, measured):
        assert events[0] == (1, [1024, 2048])
        assert events[1:] == [1024] * 6 + [2048] * 6


@pytest.mark.usefixtures("overlapping")
def test_a_later_start_measures_nothing_if_the_first_rank_knows(shape: RankShape, tmp_path: Path) -> None:
    """On whose host it is kept; what could not have been measured is measured."""

    def start(*folders: str) -> list[tuple[int, int]]:
        def build(comm: Comm) -> tuple[int, int]:
            runs: list[int] = []

            def clock(run: LayerRun) -> float:
                runs.append(run.num_tokens)
                return 1.0 if isinstance(run.layout, SequenceSharded) else 2.0

            cache = TuningCache(tmp_path / folders[comm.rank], {})
            return build_layouts("auto", comm, shape, 512, cache, clock=clock).min_tokens, len(runs)

        return run_ranks(2, build)

    assert start("host", "another") == [(1024, 12)] * 2
    assert not (tmp_path / "another").exists()
    assert start("host", "host") == [(1024, 0)] * 2
    assert start("host", "another") == [(1024, 0)] * 2
    assert start("another", "host") == [(1024, 12)] * 2
    (file,) = (tmp_path / "host").iterdir()
    damaged = file.read_bytes().replace(b'"num_tokens":1024', b'"num_tokens":1')
    file.write_bytes(damaged)
    assert start("host", "host") == [(1024, 12)] * 2
    assert file.read_bytes() != damaged


def test_times_of_layers_depend_on_what_is_timed(shape: RankShape) -> None:
    """Which is one layer, on however many ranks."""

    def facts(shape: RankShape, num_ranks: int = 2, counts: tuple[int, ...] = (1024, 2048)) -> object:
        def rank(comm: Comm) -> object:
            return LayoutTimes(
                shape, SequenceSharded(comm), comm, comm, counts, None, lambda _: 0.0, show_nothing
            ).describe()

        return run_ranks(num_ranks, rank)[0]

    deeper = msgspec.structs.replace(shape.spec, layers=shape.spec.layers[:1] * 9)
    assert facts(replace(shape, spec=deeper, max_tokens=2200)) == facts(shape)
    wider = msgspec.structs.replace(shape.spec, hidden_size=128)
    others = (
        facts(replace(shape, spec=wider)),
        facts(replace(shape, dtype=torch.bfloat16)),
        facts(shape, 4),
        facts(shape, counts=(1024,)),
    )
    assert facts(shape) not in others


def test_where_it_is_slower_nothing_is_kept(shape: RankShape, overlapping: list[int]) -> None:
    def slower(run: LayerRun) -> float:
        return 2.0 if isinstance(run.layout, SequenceSharded) else 1.0

    built = run_ranks(2, lambda comm: build_layouts("auto", comm, shape, 512, NONE, clock=slower))
    assert [(ways.shards, ways.min_tokens) for ways in built] == [(None, 0)] * 2
    assert overlapping[2:] == [-1, -1]


@pytest.mark.usefixtures("overlapping")
def test_steps_too_small_are_not_measured(shape: RankShape) -> None:
    small = replace(shape, max_tokens=512)
    built = run_ranks(2, lambda comm: build_layouts("auto", comm, small, 512, NONE, clock=lambda _: 1 / 0))
    assert [ways.shards for ways in built] == [None, None]


@pytest.mark.parametrize(
    ("shards", "least"),
    [
        ((2.0, 2.0, 2.0), 0),
        ((2.0, 2.0, 0.9), 4096),
        ((0.9, 0.9, 0.9), 1024),
        ((0.9, 2.0, 0.9), 4096),  # from there on
        ((0.9, 0.9, 0.99), 0),  # chance
        ((0.99, 0.98, 0.97), 2048),
    ],
)
def test_the_least_count_from_which_on_shards_are_faster(shards: tuple[float, ...], least: int) -> None:
    counts = (1024, 2048, 4096)
    assert find_least_tokens([Timing(n, 1.0, t) for n, t in zip(counts, shards, strict=True)]) == least


def test_counts_are_above_what_is_captured() -> None:
    assert list_token_counts(0, 4096) == [512, 1024, 2048, 4096]
    assert list_token_counts(511, 600) == [512]
    assert list_token_counts(512, 4000) == [1024, 2048]
    assert list_token_counts(8192, 8192) == []


def test_the_workspace_holds_two_parts_of_the_largest_step(shape: RankShape) -> None:
    assert count_workspace_bytes(shape.spec, shape.dtype, shape.max_tokens, 4) == 2 * 525 * shape.spec.hidden_size * 4
