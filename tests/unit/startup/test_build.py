import ast
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import toka_async
from tests.cases.models import make_checkpoint
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.config import AttentionConfig, CacheConfig, CompileConfig, ModelConfig, ScheduleConfig
from toka_async.messages import Ready
from toka_async.model.activation_layout import LayoutPolicy
from toka_async.runner.runner import Runner
from toka_async.startup import build, memory
from toka_async.startup.build import build_runner
from toka_async.startup.device import device_text
from toka_async.startup.rank_coords import RankCoords
from toka_async.tuning.async_tp import build_layouts
from toka_async.tuning.store import TuningCache


def _build(
    folder: Path,
    model: ModelConfig | None = None,
    cache: CacheConfig | None = None,
    attention: AttentionConfig | None = None,
    num_sharing: int = 1,
) -> Runner:
    return build_runner(
        folder,
        read_spec(folder),
        model or ModelConfig(device="cpu"),
        cache or CacheConfig(),
        ScheduleConfig(max_seqs=4, max_tokens=64),
        attention or AttentionConfig(),
        CompileConfig(),
        place=RankCoords(num_sharing=num_sharing),
    )


def test_replicas_share_the_machine(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory."""
    page_bytes = 16 * (2 * 2 * 2 * 8 * 4 + 4)
    monkeypatch.setattr(memory, "available_memory", lambda: 4 * 48 * page_bytes)
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
    assert (rank.rank, rank.device, rank.dtype) == (0, device_text(torch.device("cpu")), "float32")
    with (model_dir / "model.safetensors").open("rb") as weights:
        assert 0.5 * weights.seek(0, 2) < rank.weights < 3 * weights.seek(0, 2)  # as float32
    assert rank.cache == 11 * 16 * 2 * 2 * 2 * 8 * 4  # a page more than sequences can have
    assert rank.used == rank.weights + rank.cache
    assert 0 < rank.free < rank.total


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
    assert _build(folder, ModelConfig(load="random", device="cpu")).ready.vocab_size == 261
    with pytest.raises(ModelError, match="safetensors"):
        _build(folder)


def test_on_a_cpu_nothing_is_measured_or_kept(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _build(model_dir)
    assert not list(tmp_path.iterdir())


def test_what_was_found_is_told(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All parts ask the same cache."""
    cache, given = TuningCache(tmp_path, {}), list[object]()

    def layouts(*args: Any, **options: Any) -> LayoutPolicy:
        given.append(options["tuning_cache"])
        return build_layouts(*args, **options)

    monkeypatch.setattr(build, "_tuning_cache", lambda *_: cache)
    monkeypatch.setattr(build, "build_layouts", layouts)
    caplog.set_level(logging.INFO)
    _build(model_dir)
    assert given == [cache]
    assert f"0 of 1 measurements found in {tmp_path}" in caplog.messages  # which graphs


def test_a_rank_on_a_cpu_imports_no_kernels() -> None:
    """Triton is not everywhere: no module that is always imported imports one that needs it."""
    todo, done = {"toka_async.startup.build"}, set[str]()
    while todo:
        name = todo.pop()
        done.add(name)
        todo |= imported_at_once(name) - done
    assert {"toka_async.runner.runner", "toka_async.attention.build"} <= done
    assert not [name for name in done if name.startswith("toka_async.kernels")]
    assert "toka_async.kernels.sampling" in imported_at_once("toka_async.runner.kernel_sampler")


def imported_at_once(name: str) -> set[str]:
    """Our modules that the module imports at its top, whatever happens."""
    package = Path(toka_async.__file__).parent.parent
    tree = ast.parse((package / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = {name for node in froms for name in (node.module, *(f"{node.module}.{a.name}" for a in node.names)) if name}
    return {name for name in names if (package / f"{name.replace('.', '/')}.py").exists()}
