"""What a stage's ranks choose by is the same on all of them, and known from an earlier start if it was kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.cases.models import make_checkpoint
from tests.drivers.thread_ranks import run_ranks
from toka_async.attention.build import NOT_MEASURED
from toka_async.attention.choice import ChoiceTable, MeasuredShape, only
from toka_async.checkpoint.division import StagePart
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import ModelSpec, read_spec
from toka_async.config import AttentionConfig, CacheConfig, CompileConfig, ScheduleConfig
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.weights import build_decoder
from toka_async.startup import build
from toka_async.startup import runner_factory as parts
from toka_async.startup.process_groups import ProcessGroups
from toka_async.startup.runner_factory import RunnerFactory, table_of_first
from toka_async.tuning.store import TuningCache

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(make_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


class OneOfTwo(LocalComm):
    size = 2


def parts_of(spec: ModelSpec, folder: Path | None, comm: Comm | None = None, **fields: Any) -> RunnerFactory:
    comm = comm or LocalComm()
    values: dict[str, Any] = {
        "decoder": build_decoder(spec, torch.float32, torch.device("meta")),
        "spec": spec,
        "meeting": ProcessGroups(comm, comm, None),
        "limits": RankLimits(max_context=512, max_seqs=48, max_tokens=300),
        "cache": CacheConfig(),
        "schedule": ScheduleConfig(),
        "attention": AttentionConfig(),
        "compiling": CompileConfig(),
        "dtype": torch.float32,
        "device": CPU,
        "tuning_cache": TuningCache(folder, {}),
    }
    return RunnerFactory(**values | fields)


class Bench:
    """Measures a table of its one part, and says so."""

    def __init__(self, part: str, facts: object = "alike") -> None:
        self.part = part
        self.num_measured = 0
        self._facts = facts

    def facts(self) -> dict[str, object]:
        return {"facts": self._facts}

    def table(self) -> ChoiceTable:
        self.num_measured += 1
        return only(self.part)

    def admits(self, table: ChoiceTable) -> bool:
        return table.decode[0].choice == self.part


def settled(parts: RunnerFactory, part: str, facts: object = "alike") -> tuple[str, int]:
    """The part that is chosen, and how often it was measured."""
    bench: Any = Bench(part, facts)
    return parts._settle(bench).decode[0].choice, bench.num_measured


def test_a_table_survives_its_way_to_the_other_ranks() -> None:
    table = ChoiceTable(
        (MeasuredShape(1, 2, "a"),), (MeasuredShape(3, 4, "b"),), (MeasuredShape(5, 6, "c"),), ((7, 8), (9, 10))
    )
    assert table_of_first(LocalComm(), table) == table


def test_a_later_start_measures_no_attention(spec: ModelSpec, tmp_path: Path) -> None:
    assert settled(parts_of(spec, tmp_path), "own") == ("own", 1)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_ino
    assert settled(parts_of(spec, tmp_path), "own") == ("own", 0)
    assert file.stat().st_ino == written
    assert settled(parts_of(spec, tmp_path), "own", "others") == ("own", 1)
    assert settled(parts_of(spec, None), "own") == ("own", 1)


def test_a_table_that_cannot_be_chosen_by_is_measured_anew(spec: ModelSpec, tmp_path: Path) -> None:
    settled(parts_of(spec, tmp_path), "own")
    assert settled(parts_of(spec, tmp_path), "library") == ("library", 1)
    assert settled(parts_of(spec, tmp_path), "library") == ("library", 0)


def test_ranks_choose_by_the_table_of_the_first(spec: ModelSpec, tmp_path: Path) -> None:
    """Whether each finds one or measures; the others keep it, too."""

    def start(*folders: str) -> list[tuple[str, int]]:
        def rank(comm: Comm) -> tuple[str, int]:
            parts = parts_of(spec, tmp_path / folders[comm.rank], comm)
            bench: Any = Bench(f"of rank {comm.rank}")
            bench.admits = lambda _: True
            return parts._settle(bench).decode[0].choice, bench.num_measured

        return run_ranks(2, rank)

    assert start("here", "there") == [("of rank 0", 1)] * 2
    assert start("here", "there") == [("of rank 0", 0)] * 2
    assert start("here", "elsewhere") == [("of rank 0", 0), ("of rank 0", 1)]
    assert start("nowhere", "here") == [("of rank 0", 1), ("of rank 0", 0)]


@pytest.mark.parametrize("trial", [False, True])
def test_nothing_is_settled_for_a_trial(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, trial: bool) -> None:
    asked: dict[str, Any] = {}

    def built(*_: object, **options: object) -> None:
        asked.update(options)
        raise InterruptedError

    monkeypatch.setattr(parts, "build_attention", built)
    of = parts_of(spec, None)
    with pytest.raises(InterruptedError):
        of.runner(4, trial)
    assert asked["table"] == (NOT_MEASURED if trial else None)
    assert asked["settle"] == of._settle


def test_a_later_start_knows_which_graphs_are_kept(spec: ModelSpec, tmp_path: Path) -> None:
    assert parts_of(spec, tmp_path).graph_sizes(16, True) == []
    parts_of(spec, tmp_path).keep_graph_sizes(16, True, [])  # of attention that is not captured
    assert not list(tmp_path.iterdir())
    parts_of(spec, tmp_path).keep_graph_sizes(16, True, [1, 8, 16])
    assert parts_of(spec, tmp_path).graph_sizes(16, True) == [1, 8, 16]
    assert parts_of(spec, tmp_path).graph_sizes(16, False) == []
    assert parts_of(spec, tmp_path).graph_sizes(8, True) == []
    assert parts_of(spec, None).graph_sizes(16, True) == []


def test_without_graphs_none_are_asked_for(spec: ModelSpec, tmp_path: Path) -> None:
    of = parts_of(spec, tmp_path)
    assert of.graph_sizes(0, True) == []
    assert of.tuning_cache.num_asked == 0


@pytest.mark.parametrize(
    ("kept", "sizes"),
    [
        ([16, 4, 4, 1, 16], [1, 4, 16]),
        *(([1, 8], []), ([1, 3, 16], []), ([0, 16], []), ([-1, 16], []), ([16, 24], []), ([10**30], []), ([], [])),
    ],
)
def test_sizes_of_graphs_that_cannot_be_are_found_out(
    spec: ModelSpec, tmp_path: Path, kept: list[int], sizes: list[int]
) -> None:
    parts_of(spec, tmp_path).keep_graph_sizes(16, True, [1, 8, 16])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes().replace(b"[1,8,16]", str(kept).encode()))
    assert parts_of(spec, tmp_path).graph_sizes(16, True) == sizes


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.bfloat16},
        {"limits": RankLimits(max_context=512, max_seqs=64, max_tokens=300)},
        {"limits": RankLimits(max_context=1024, max_seqs=48, max_tokens=300)},
        {"cache": CacheConfig(page_size=32)},
        {"attention": AttentionConfig(backend="triton")},
        {"meeting": ProcessGroups(OneOfTwo(), LocalComm(), None)},
        {"meeting": ProcessGroups(LocalComm(), OneOfTwo(), None)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_graphs_of_something_else_are_other_graphs(spec: ModelSpec, tmp_path: Path, other: dict[str, Any]) -> None:
    parts_of(spec, tmp_path).keep_graph_sizes(16, True, [1, 8, 16])
    assert parts_of(spec, tmp_path, **other).graph_sizes(16, True) == []


def test_graphs_of_other_layers_and_other_ends_are_other_graphs(spec: ModelSpec, tmp_path: Path) -> None:
    """The stages of a pipeline are alike but for their ends."""
    parts_of(spec, tmp_path).keep_graph_sizes(16, True, [1, 8, 16])
    other = msgspec.structs.replace(spec, num_layers=1, windows=(0,))
    assert parts_of(other, tmp_path).graph_sizes(16, True) == []
    for stage in (StagePart(0, 2, 6), StagePart(2, 4, 6), StagePart(4, 6, 6)):
        decoder = build_decoder(
            msgspec.structs.replace(spec, num_layers=6, windows=(0,) * 6),
            torch.float32,
            torch.device("meta"),
            part=stage,
        )
        assert parts_of(spec, tmp_path, decoder=decoder).graph_sizes(16, True) == []
        parts_of(spec, tmp_path, decoder=decoder).keep_graph_sizes(16, True, [16])


def test_ranks_capture_what_the_first_one_knows(spec: ModelSpec, tmp_path: Path) -> None:
    def rank(comm: Comm) -> list[list[int]]:
        """Either of them knows."""
        found = []
        for knows in range(2):
            parts = parts_of(spec, tmp_path / str(knows) / str(comm.rank), comm)
            if comm.rank == knows:
                parts.keep_graph_sizes(16, True, [1, 8, 16])
            found.append(parts.graph_sizes(16, True))
        return found

    assert run_ranks(2, rank) == [[[1, 8, 16], []]] * 2


@pytest.mark.parametrize(("known", "kept"), [([1, 16], []), ([], [[4, 16]])])
def test_sizes_are_kept_once_they_were_found_out(
    monkeypatch: pytest.MonkeyPatch, known: list[int], kept: list[list[int]]
) -> None:
    warmed: list[Any] = []
    monkeypatch.setattr(build, "warm_up", lambda *args: warmed.append(args[-1]))
    found: list[Any] = []
    parts: Any = SimpleNamespace(
        graph_sizes=lambda *asked: known if asked == (16, True) else None,
        keep_graph_sizes=lambda *of: found.append(of),
    )
    runner: Any = SimpleNamespace(decode=SimpleNamespace(graph_sizes=[4, 16]))
    stages: Any = None
    build._warm_up(runner, parts, stages, 16, True, 1)
    assert warmed == [known]
    assert found == [(16, True, sizes) for sizes in kept]


def test_answers_depend_on_how_products_are_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled or not, tuned or not: a layer's time depends on it, and a graph's."""
    gpu = {"gpu": "large"}
    monkeypatch.setattr(build, "gpu_platform", lambda _: gpu)
    usual = CompileConfig(tuning_dir=str(tmp_path))

    def cache_of(compiling: CompileConfig) -> TuningCache:
        return build._tuning_cache(torch.device("cuda"), compiling)

    cache_of(usual).keep("async-tp", {}, [1])
    assert len(list(tmp_path.iterdir())) == 1
    for changed, found in (({}, [1]), ({"enabled": True}, None), ({"tune": False}, None), ({"graphs": False}, [1])):
        assert cache_of(msgspec.structs.replace(usual, **changed)).find("async-tp", {}, list[int]) == found
    gpu["gpu"] = "small"
    assert cache_of(usual).find("async-tp", {}, list[int]) is None
