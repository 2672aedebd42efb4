from __future__ import annotations

import ast
import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import toka_async
from tests.cases.models import make_checkpoint
from tests.fakes.graphs import FakeGraphs
from tests.fakes.model import FakeAttention, FakeCache, FakeModel
from toka_async.attention.build import BuiltAttention, build_attention
from toka_async.attention.invariant.by_token import TokenAttention
from toka_async.attention.kv_cache import E4M3, CacheFormat, LayerScales
from toka_async.attention.modules import ModuleRequest
from toka_async.checkpoint.division import StagePart
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.config import (
    AttentionConfig,
    CacheConfig,
    Config,
    GraphsConfig,
    ModelConfig,
    ScheduleConfig,
    TuningConfig,
)
from toka_async.messages import Ready
from toka_async.model.activation_layout import LayoutPolicy, Replicated, SequenceSharded
from toka_async.model.comm import LocalComm
from toka_async.model.matrices.blocked_ops import BlockedOps
from toka_async.model.weights import build_decoder
from toka_async.runner.runner import Runner, SamplingSetup
from toka_async.startup import device, memory, rank_attention, runner_factory
from toka_async.startup.device import name_device, open_tuning_cache
from toka_async.startup.progress import StartupProgress
from toka_async.startup.rank_coords import RankCoords
from toka_async.startup.runner_factory import RunnerFactory
from toka_async.tuning.async_tp import build_layouts
from toka_async.tuning.store import Facts, TuningCache


def _factory(folder: Path, num_sharing: int = 1, **sections: Any) -> RunnerFactory:
    small = ScheduleConfig(max_seqs=4, max_tokens=64)
    config = Config(**{"model": ModelConfig(device="cpu"), "schedule": small} | sections)
    return RunnerFactory(folder, read_spec(folder), config, RankCoords(num_sharing=num_sharing))


def _build(folder: Path, num_sharing: int = 1, **sections: Any) -> Runner:
    return _factory(folder, num_sharing, **sections).build()


def test_replicas_share_the_machine(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory."""
    page_bytes = 16 * (2 * 2 * 2 * 8 * 4 + 4)
    monkeypatch.setattr(memory, "read_available_memory", lambda: 4 * 48 * page_bytes)
    assert [_build(model_dir, num_sharing=number).ready.num_pages for number in (1, 2, 3)] == [48, 24, 16]


def test_ready_says_what_fits(model_dir: Path) -> None:
    ready = msgspec.structs.replace(_build(model_dir).ready, ranks=())
    num_pages = 4 * 512 // 16
    assert ready == Ready(
        num_pages=num_pages,
        page_size=16,
        max_seqs=4,
        max_context=512,
        vocab_size=261,
        max_tokens=64,
        group_min_seqs=16,
        group_min_tokens=137 * 16,  # 2 KiB a page: 15 times as much is spared, 4 MiB in all
    )


def test_it_tells_what_its_memory_is_taken_by(model_dir: Path) -> None:
    runner = _build(model_dir, cache=CacheConfig(num_tokens=160))
    (rank,) = runner.ready.ranks
    assert (rank.rank, rank.device, rank.dtype) == (0, name_device(torch.device("cpu")), "float32")
    with (model_dir / "model.safetensors").open("rb") as weights:
        assert 0.5 * weights.seek(0, 2) < rank.weights < 3 * weights.seek(0, 2)  # as float32
    assert rank.cache == 11 * 16 * 2 * 2 * 2 * 8 * 4  # a page more than sequences can have
    assert rank.used == rank.weights + rank.cache
    assert 0 < rank.free < rank.total


@pytest.mark.parametrize("invariant", [False, True])
def test_a_cache_in_fp8_with_the_checkpoints_scales(model_dir: Path, invariant: bool) -> None:
    """Also where a row's bits are the same in every batch."""
    path = model_dir / "model.safetensors"
    save_file(load_file(path) | {"model.layers.1.self_attn.k_scale": torch.tensor(0.25)}, path)
    factory = _factory(
        model_dir,
        cache=CacheConfig(num_tokens=160, dtype="fp8"),
        model=ModelConfig(device="cpu", batch_invariant=invariant),
    )
    (rank,) = factory.build().ready.ranks
    assert rank.dtype == "float32, cache in fp8"
    assert rank.cache == 11 * 16 * 2 * 2 * 2 * 8
    assert factory.cache_format == CacheFormat(E4M3, (LayerScales(), LayerScales(0.25)))


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 100])
def test_a_sequence_is_no_longer_than_the_cache(model_dir: Path, num_tokens: int) -> None:
    ready = _build(model_dir, cache=CacheConfig(page_size=1, num_tokens=num_tokens)).ready
    assert (ready.num_pages, ready.max_context) == (num_tokens, num_tokens)


def test_a_cache_that_memory_cannot_hold(model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"cache.num_tokens=10000000000000: .*use at most \d+"):
        _build(model_dir, cache=CacheConfig(num_tokens=10**13))


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    (folder / "model.safetensors").unlink()
    assert _build(folder, model=ModelConfig(load="random", device="cpu")).ready.vocab_size == 261
    with pytest.raises(ModelError, match="safetensors"):
        _build(folder)


def test_on_a_cpu_nothing_is_measured_or_kept(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _build(model_dir)
    assert not list(tmp_path.iterdir())


def test_only_what_a_start_does_is_shown(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank alone on a CPU meets no others, and measures nothing."""
    shown: dict[str, str] = {}

    def stage(_: StartupProgress, name: str, what: str = "") -> AbstractContextManager[None]:
        shown[name] = what
        return nullcontext()

    monkeypatch.setattr(StartupProgress, "stage", stage)
    _build(model_dir)
    assert (shown["device"], shown["memory"]) == ("starting the device", "")
    assert "matrices" not in shown


def test_what_was_found_is_told(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All choices ask the same cache."""
    cache = TuningCache(tmp_path, {})

    def layouts(*args: Any, **options: Any) -> LayoutPolicy:
        (given,) = [value for value in args if isinstance(value, TuningCache)]
        given.find("async-tp", {}, list[int])
        return build_layouts(*args, **options)

    monkeypatch.setattr(runner_factory, "open_tuning_cache", lambda *_: cache)
    monkeypatch.setattr(runner_factory, "build_layouts", layouts)
    caplog.set_level(logging.INFO)
    _build(model_dir)
    assert f"0 of 1 measurements found in {tmp_path}" in caplog.messages


@pytest.mark.parametrize("asked", [False, True])
def test_attention_is_tried_out_unless_it_is_for_a_trial(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    options: dict[str, Any] = {}

    def built(*_: object, **given: object) -> None:
        options.update(given)
        raise InterruptedError

    factory = _factory(model_dir)
    decoder = factory._load_decoder(factory._build_layouts())
    monkeypatch.setattr(rank_attention, "build_attention", built)
    with pytest.raises(InterruptedError):
        factory._make_runner(decoder, None, 4, True, factory._choose_table if asked else None)
    assert options["choose"] == (factory._choose_table if asked else None)


class FlashInferThere:
    """What a factory asks and does about FlashInfer's modules, of which `missing` are not compiled."""

    def __init__(self, patch: pytest.MonkeyPatch, missing: int = 1, failure: Exception | None = None) -> None:
        self.missing, self.failure = missing, failure
        self.done: list[str] = []
        patch.setattr(runner_factory, "explain_no_flashinfer", lambda *_: "")
        patch.setattr(runner_factory, "list_architectures", lambda: "9.0a")
        patch.setattr(runner_factory, "find_missing", self.find_missing)
        patch.setattr(runner_factory, "compile_now", lambda *_: self.done.append("now"))
        patch.setattr(runner_factory, "compile_in_background", lambda _: self.done.append("later"))

    def find_missing(self, request: ModuleRequest) -> list[object]:
        assert (request.architectures, request.dtype) == ("9.0a", "float32")
        if self.failure is not None:
            raise self.failure
        return [object()] * self.missing


@pytest.mark.parametrize(
    ("missing", "compiles_first", "backend", "there", "done"),
    [
        (0, False, "auto", True, []),
        (1, False, "auto", False, ["later"]),
        (1, True, "auto", True, ["now"]),
        (1, False, "flashinfer", True, ["now"]),
        (1, False, "triton", True, []),  # nothing of FlashInfer is used
    ],
)
def test_serving_does_not_wait_for_flashinfers_compiler(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: int,
    compiles_first: bool,
    backend: str,
    there: bool,
    done: list[str],
) -> None:
    flashinfer, given = FlashInferThere(monkeypatch, missing), list[bool]()
    factory = _factory(model_dir, attention=AttentionConfig(backend=backend))  # type: ignore[arg-type]
    factory.compiles_first = compiles_first

    def build_reference(_: str, *arguments: Any, with_flashinfer: bool, **options: Any) -> BuiltAttention:
        given.append(with_flashinfer)
        return build_attention("reference", *arguments, **options)

    monkeypatch.setattr(rank_attention, "build_attention", build_reference)
    factory.build()
    assert flashinfer.done == done
    assert set(given) == {there}


def test_one_rank_of_the_machine_compiles(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer = FlashInferThere(monkeypatch)
    factory = _factory(model_dir)
    factory.compiles_first = False
    factory.coords = RankCoords(device_index=1)
    factory.build()
    assert flashinfer.done == []


def test_where_flashinfer_does_not_work(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FlashInferThere(monkeypatch, failure=RuntimeError("FlashInfer requires GPUs with sm75 or higher"))
    factory = _factory(model_dir)
    assert not factory._prepare_flashinfer()
    assert factory.flashinfer_failed
    assert caplog.messages == [
        "attention.backend=auto: FlashInfer does not work here, so it is not used: "
        "FlashInfer requires GPUs with sm75 or higher"
    ]
    with pytest.raises(ModelError, match=r"^attention.backend=flashinfer: it does not work here: .* higher; use auto$"):
        _factory(model_dir, attention=AttentionConfig(backend="flashinfer"))._prepare_flashinfer()


def test_what_is_not_kept_for_later_starts_is_told(model_dir: Path, tmp_path: Path) -> None:
    factory = _factory(model_dir)
    assert factory.describe_kept() == "a CPU compiles and measures nothing"
    factory.kind, factory.tuning_cache = "cuda", TuningCache(tmp_path, {})
    assert factory.describe_kept() == "all of it is on the disk"
    factory.tuning_cache = TuningCache(None, {})
    assert factory.describe_kept() == "all is on the disk except measurements; the next start repeats that"
    factory.flashinfer_failed = True
    assert "except measurements and FlashInfer's modules;" in factory.describe_kept()


def test_graphs_depend_on_the_model_and_its_limits(model_dir: Path) -> None:
    """And on the ends that a pipeline's stage has: without them, the stages would be alike."""

    def facts(num_layers: int = 2, stage: StagePart | None = None, **sections: Any) -> Facts:
        factory = _factory(model_dir, **sections)
        layer = factory.spec.layers[0]
        spec = msgspec.structs.replace(factory.spec, layers=(layer,) * 6) if stage else factory.spec
        factory.rank_spec = msgspec.structs.replace(spec, layers=(layer,) * num_layers)
        decoder = build_decoder(spec, torch.float32, torch.device("meta"), part=stage)
        return factory._describe_graphs(decoder)

    assert facts() == facts()
    others = [
        facts(num_layers=1),
        facts(model=ModelConfig(device="cpu", dtype="bfloat16")),
        facts(model=ModelConfig(device="cpu", max_context=64)),
        facts(schedule=ScheduleConfig(max_seqs=5, max_tokens=64)),
        facts(cache=CacheConfig(page_size=32)),
        facts(attention=AttentionConfig(backend="reference")),
        *(facts(stage=stage) for stage in (StagePart(0, 2, 6), StagePart(2, 4, 6), StagePart(4, 6, 6))),
    ]
    assert all(each != facts() for each in others)
    assert all(one != other for number, one in enumerate(others) for other in others[:number])


def test_graphs_are_captured_and_a_later_start_knows_which_ones(
    model_dir: Path, tmp_path: Path, fake_graphs: FakeGraphs
) -> None:
    """Also with other groups they are other graphs."""

    def start(group_min_seqs: int) -> tuple[list[int], int]:
        """Rows of the graphs, and how many were captured to find out."""
        factory = _factory(model_dir, schedule=ScheduleConfig(max_seqs=8, group_min_seqs=group_min_seqs))
        factory.tuning_cache = TuningCache(tmp_path, {})
        cache, attention = FakeCache(41, 4), FakeAttention()
        ready = Ready(num_pages=40, page_size=4, max_seqs=8, max_context=60, vocab_size=50, max_tokens=64)
        built, sampling = BuiltAttention(attention, attention), SamplingSetup(kernels=True)
        runner = Runner(ready, torch.device("cpu"), FakeModel(50, cache), cache, built, sampling)
        before = len(fake_graphs.list_steps())
        decoder = build_decoder(factory.spec, torch.float32, torch.device("meta"))
        factory._warm_up(runner, decoder, 8, 0)
        assert runner.decode is not None
        assert runner.decode.graphs is not None
        return runner.decode.graphs.sizes, len(fake_graphs.list_steps()) - before

    fake_graphs.slow = {4: 9.0}
    assert start(0) == ([1, 2, 8], 4)
    assert start(0) == ([1, 2, 8], 3)
    assert start(2) == ([1, 2, 8], 7)  # one row has no groups
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("max_tokens", "sizes"), [(40, [16, 32, 40]), (0, [])])
def test_steps_with_prompts_are_captured_too(
    model_dir: Path, fake_graphs: FakeGraphs, max_tokens: int, sizes: list[int]
) -> None:
    factory = _factory(model_dir)
    ready = Ready(num_pages=40, page_size=4, max_seqs=8, max_context=60, vocab_size=50, max_tokens=64)
    cache, attention = FakeCache(41, 4), FakeAttention()
    built, sampling = BuiltAttention(attention, attention, mixed=attention), SamplingSetup(kernels=True)
    runner = Runner(ready, torch.device("cpu"), FakeModel(50, cache), cache, built, sampling)
    factory._warm_up(runner, build_decoder(factory.spec, torch.float32, torch.device("meta")), 2, max_tokens)
    assert runner.mixed is not None
    assert (runner.mixed.graphs.sizes if runner.mixed.graphs is not None else []) == sizes
    assert (fake_graphs.num_replays("mixed") > 0) == bool(sizes)  # by the warm-up's prompts


@pytest.mark.parametrize(("shards", "tokens"), [(False, 64), (True, 6)])
def test_prompts_in_shards_are_not_captured(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, shards: bool, tokens: int
) -> None:
    monkeypatch.setattr(runner_factory, "has_kernels", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 36))
    whole = Replicated(LocalComm())
    layouts = LayoutPolicy(whole, SequenceSharded(LocalComm()), 7) if shards else LayoutPolicy(whole)
    assert _factory(model_dir)._count_graph_tokens(layouts) == tokens


def test_a_cpu_captures_nothing(model_dir: Path) -> None:
    assert _factory(model_dir)._count_graph_tokens(LayoutPolicy(Replicated(LocalComm()))) == 0


def test_a_start_says_that_it_loads_a_librarys_kernels(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factory, said = _factory(model_dir), list[str]()
    runner = factory.build()
    assert "products" not in factory.stages.seconds
    monkeypatch.setattr(runner_factory, "has_kernels", lambda _: True)
    monkeypatch.setattr(runner_factory, "load_products", lambda *_: said.append(factory.stages._stage))
    factory._warm_up(runner, build_decoder(factory.spec, torch.float32, torch.device("meta")), 0, 0)
    assert said == ["products"]
    assert "products" in factory.stages.seconds


@pytest.mark.parametrize("most", [0, 8])
def test_what_cannot_be_captured_is_not_asked_for(model_dir: Path, most: int) -> None:
    factory = _factory(model_dir)
    runner = factory.build()
    before = factory.tuning_cache.num_asked
    factory._warm_up(runner, build_decoder(factory.spec, torch.float32, torch.device("meta")), most, 0)
    assert factory.tuning_cache.num_asked == before


def test_groups_pay_as_measured_or_as_configured(model_dir: Path) -> None:
    measured = BuiltAttention(FakeAttention(), pays=lambda num_rows, num_tokens: num_rows * num_tokens > 100)

    def rule(**schedule: Any) -> list[bool]:
        pays = _factory(model_dir, schedule=ScheduleConfig(**schedule))._make_group_rule(measured)
        return [pays(4, 16), pays(4, 64), pays(8, 4)]

    assert rule() == [False, True, False]
    assert rule(group_min_seqs=5) == [False, False, True]
    assert rule(group_min_seqs=4, group_min_tokens=1) == [True, True, True]
    assert rule(group_min_tokens=64) == [True, True, True]  # the scheduler has looked at the tokens


def test_answers_depend_on_how_products_are_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tuned or not: a layer's time depends on it, and a graph's."""
    gpu = {"gpu": "large"}
    monkeypatch.setattr(device, "describe_gpu", lambda _: gpu)

    def cache_of(**changed: Any) -> TuningCache:
        return open_tuning_cache(torch.device("cuda"), Config(tuning=TuningConfig(dir=str(tmp_path), **changed)))

    cache_of().keep("async-tp", {}, [1])
    assert len(list(tmp_path.iterdir())) == 1
    assert cache_of().find("async-tp", {}, list[int]) == [1]
    assert cache_of(products=False).find("async-tp", {}, list[int]) is None
    gpu["gpu"] = "small"
    assert cache_of().find("async-tp", {}, list[int]) is None


@pytest.mark.parametrize(("shards", "rows"), [(False, 12), (True, 6)])
def test_steps_in_shards_are_not_captured(model_dir: Path, shards: bool, rows: int) -> None:
    factory = _factory(model_dir, graphs=GraphsConfig(max_rows=12), schedule=ScheduleConfig(max_seqs=16))
    whole = Replicated(LocalComm())
    layouts = LayoutPolicy(whole, SequenceSharded(LocalComm()), 7) if shards else LayoutPolicy(whole)
    assert factory._count_graph_rows(layouts) == rows
    assert _factory(model_dir, graphs=GraphsConfig(enabled=False))._count_graph_rows(layouts) == 0
    assert _factory(model_dir, schedule=ScheduleConfig(max_seqs=3))._count_graph_rows(LayoutPolicy(whole)) == 3


@pytest.mark.parametrize(
    ("decode", "mixed", "expected"),
    [
        (SimpleNamespace(can_capture=True), object(), (12, 100)),
        (SimpleNamespace(can_capture=True), None, (12, 0)),
        (SimpleNamespace(can_capture=False), object(), (0, 0)),
        (None, None, (0, 0)),
    ],
)
def test_what_attention_cannot_capture_needs_no_memory(
    model_dir: Path, decode: object, mixed: object, expected: tuple[int, int]
) -> None:
    runner: Any = SimpleNamespace(decode=decode, mixed=mixed)
    decoder: Any = None  # which nothing is measured of
    factory = _factory(model_dir)
    assert factory._limit_graphs(runner, decoder, 12, 100) == expected
    assert factory._limit_graphs(runner, decoder, 0, 100) == (0, 0)


@pytest.mark.parametrize("max_rows", ["auto", 3000])
def test_automatic_graphs_are_as_large_as_memory_allows(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, max_rows: int | Literal["auto"]
) -> None:
    """But decide only with the usual number of rows from which steps on are measured in shards."""
    factory = _factory(model_dir, graphs=GraphsConfig(max_rows=max_rows), schedule=ScheduleConfig(max_seqs=8192))
    layouts = LayoutPolicy(Replicated(LocalComm()))
    assert factory._count_graph_rows(layouts) == (512 if max_rows == "auto" else 3000)  # on a CPU none is captured
    monkeypatch.setattr(runner_factory, "has_kernels", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    assert factory._count_graph_rows(layouts) == (4096 if max_rows == "auto" else 3000)
    assert factory._count_graph_rows() == (512 if max_rows == "auto" else 3000)


def test_a_rank_on_a_cpu_imports_no_kernels() -> None:
    """Triton is not everywhere: no module that is always imported imports one that needs it."""
    todo, done = {"toka_async.startup.runner_factory"}, set[str]()
    while todo:
        name = todo.pop()
        done.add(name)
        todo |= imported_at_once(name) - done
    assert {"toka_async.runner.runner", "toka_async.attention.build"} <= done
    kernels = {name.removeprefix("toka_async.kernels.") for name in done if name.startswith("toka_async.kernels")}
    assert kernels == {"delta.layer", "experts.weights", "scaled_weight", "support"}
    assert "toka_async.kernels.sampling.kernels" in imported_at_once("toka_async.runner.kernel_sampler")


def imported_at_once(name: str) -> set[str]:
    """Our modules that the module imports at its top, whatever happens."""
    package = Path(toka_async.__file__).parent.parent
    tree = ast.parse((package / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = {name for node in froms for name in (node.module, *(f"{node.module}.{a.name}" for a in node.names)) if name}
    return {name for name in names if (package / f"{name.replace('.', '/')}.py").exists()}


def test_a_batch_invariant_model_is_built_of_other_parts(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU blocked products and attention by token; with kernels nothing is tuned."""
    made: list[Runner] = []
    monkeypatch.setattr(runner_factory, "warm_up", lambda runner, *_: made.append(runner))
    factory = _factory(model_dir, model=ModelConfig(device="cpu", batch_invariant=True))
    ready = factory.build().ready
    assert isinstance(factory.ops, BlockedOps)
    assert isinstance(made[0]._attention.backend, TokenAttention)
    assert (ready.group_min_seqs, ready.group_min_tokens) == (0, 0)
    pytest.importorskip("triton")
    from toka_async.kernels.invariant.products import InvariantOps

    monkeypatch.setattr(runner_factory, "has_kernels", lambda _: True)
    factory = _factory(model_dir, model=ModelConfig(device="cpu", batch_invariant=True))
    assert isinstance(factory.ops, InvariantOps)
    assert factory.tuning is None
