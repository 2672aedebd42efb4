from pathlib import Path

import pytest

from tests.cases.models import make_checkpoint
from toka_async.checkpoint.limits import (
    DeviceKind,
    PageBytes,
    RankLimits,
    resolve_limits,
    resolve_num_pages,
    resolve_num_window_pages,
)
from toka_async.checkpoint.spec import ModelError, ModelSpec, read_spec
from toka_async.config import CacheConfig, ModelConfig, ScheduleConfig

MIB = 1 << 20


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_spec(make_checkpoint(tmp_path / "model", "llama"))


@pytest.mark.parametrize(("device", "max_seqs", "max_tokens"), [("cpu", 256, 2048), ("cuda", 8192, 32768)])
def test_auto(spec: ModelSpec, device: DeviceKind, max_seqs: int, max_tokens: int) -> None:
    limits = resolve_limits(ModelConfig(), ScheduleConfig(), spec, device)
    assert limits == RankLimits(max_seqs, max_tokens, spec.max_context)


def test_a_simulated_context_can_be_any(spec: ModelSpec) -> None:
    limits = resolve_limits(ModelConfig(max_context=10**6), ScheduleConfig(), spec, "simulated")
    assert limits == RankLimits(8192, 32768, 10**6)


def test_explicit(spec: ModelSpec) -> None:
    limits = resolve_limits(ModelConfig(max_context=99), ScheduleConfig(max_seqs=7, max_tokens=50), spec, "cpu")
    assert limits == RankLimits(7, 50, 99)


@pytest.mark.parametrize("device", ["cpu", "cuda", "simulated"])
def test_a_step_has_a_token_for_every_sequence(spec: ModelSpec, device: DeviceKind) -> None:
    def resolve(**schedule: int) -> tuple[int, int]:
        limits = resolve_limits(ModelConfig(), ScheduleConfig(**schedule), spec, device)
        return limits.max_seqs, limits.max_tokens

    assert resolve(max_tokens=9) == (9, 9)
    assert resolve(max_seqs=10**6) == (10**6, 10**6)
    assert resolve(max_seqs=4, max_tokens=4) == (4, 4)


@pytest.mark.parametrize(
    ("model", "schedule", "name"),
    [
        (ModelConfig(max_context=513), ScheduleConfig(), "model.max_context=513"),
        (ModelConfig(max_context=0), ScheduleConfig(), "model.max_context=0"),
        (ModelConfig(), ScheduleConfig(max_seqs=0), "schedule.max_seqs=0"),
        (ModelConfig(), ScheduleConfig(max_tokens=-1), "schedule.max_tokens=-1"),
        (ModelConfig(), ScheduleConfig(max_seqs=3, max_tokens=-1), "schedule.max_tokens=-1"),
        (ModelConfig(), ScheduleConfig(max_seqs=5, max_tokens=4), r"schedule.max_tokens=4: .*max_seqs \(5\)"),
    ],
)
def test_impossible(spec: ModelSpec, model: ModelConfig, schedule: ScheduleConfig, name: str) -> None:
    with pytest.raises(ModelError, match=name):
        resolve_limits(model, schedule, spec, "cpu")


def _pages(cache: CacheConfig, auto_bytes: int = 10 * MIB, most_bytes: int = 40 * MIB) -> int:
    return resolve_num_pages(cache, RankLimits(4, 100, 160), PageBytes(MIB), auto_bytes, most_bytes)


def test_auto_takes_what_it_may_and_no_more_than_sequences_can_use() -> None:
    assert _pages(CacheConfig()) == 10
    assert _pages(CacheConfig(), auto_bytes=1000 * MIB) == 4 * 10
    assert _pages(CacheConfig(page_size=100), auto_bytes=1000 * MIB) == 4 * 2


def test_explicit_is_rounded_down_to_pages() -> None:
    assert _pages(CacheConfig(num_tokens=16)) == 1
    assert _pages(CacheConfig(num_tokens=16 * 40 + 15)) == 40


@pytest.mark.parametrize(
    ("cache", "most_bytes", "message"),
    [
        (CacheConfig(num_tokens=15), 40 * MIB, r"cache.num_tokens=15: less than a page; .* \(16\)"),
        (CacheConfig(num_tokens=-1), 40 * MIB, "cache.num_tokens=-1"),
        (CacheConfig(num_tokens=16 * 41), 40 * MIB, "takes 41 MiB where 40 MiB are free; use at most 640"),
        (CacheConfig(num_tokens=16), -5, "where 0 MiB are free"),
        (CacheConfig(), 40 * MIB, "cache.num_tokens=auto: no memory"),
    ],
)
def test_what_does_not_fit(cache: CacheConfig, most_bytes: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _pages(cache, auto_bytes=MIB - 1, most_bytes=most_bytes)


def test_window_pages_are_a_part_of_all() -> None:
    limits, cache = RankLimits(max_seqs=500, max_tokens=4096, max_context=131_072), CacheConfig()
    assert resolve_num_window_pages(cache, limits, 0, 9000) == 0
    assert resolve_num_window_pages(cache, limits, 128, 9000) == 9000 * 3 // 8
    assert resolve_num_window_pages(cache, limits, 128, 90_000) == 500 * 12 + 256, "as many as all sequences need"
    assert resolve_num_window_pages(cache, limits, 128, 20) == 12, "a sequence can run alone"
    assert resolve_num_window_pages(cache, limits, 128, 7) == 7
    short = RankLimits(max_seqs=500, max_tokens=4096, max_context=1024)
    assert resolve_num_window_pages(cache, short, 128, 9000) == 9000 // 2, "sequences are short beside the window"
    assert resolve_num_window_pages(cache, short, 512, 9000) == 9000
    assert resolve_num_window_pages(CacheConfig(num_window_tokens=1600), limits, 128, 9000) == 100


def test_pages_and_their_window_pages_fill_the_memory() -> None:
    limits, cache = RankLimits(max_seqs=1000, max_tokens=2048, max_context=131_072), CacheConfig()
    sizes = PageBytes(page=1000, window_page=4000, window=128)
    for num_bytes in (0, 999, 10**6, 10**7, 10**9):
        count = sizes.count_fitting(cache, limits, num_bytes)
        assert sizes.count(cache, limits, count) <= num_bytes < sizes.count(cache, limits, count + 1)
    assert sizes.count_fitting(cache, limits, -5) == 0
    assert resolve_num_pages(cache, limits, sizes, 10**7, 0) == 4000
    with pytest.raises(ModelError, match="use at most 64000"):
        resolve_num_pages(CacheConfig(num_tokens=16 * 4001), limits, sizes, 0, 10**7 + 999)
