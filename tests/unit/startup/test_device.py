from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.cases.models import make_checkpoint
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.config import AttentionConfig, CacheConfig, Config, ModelConfig
from toka_async.startup import device
from toka_async.startup.device import (
    check_stored_dtype,
    check_weight_formats,
    has_kernels,
    name_types,
    resolve_device,
    resolve_dtype,
    resolve_num_threads,
    resolve_stored_dtype,
)
from toka_async.startup.rank_coords import RankCoords
from toka_async.startup.runner_factory import RunnerFactory


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ModelError, match=r"model\.device=cuda"):
        resolve_device(ModelConfig(device="cuda"))
    assert resolve_device(ModelConfig()) == torch.device("cpu")


def test_every_rank_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert resolve_device(ModelConfig(), RankCoords(1, 2, device_index=1)) == torch.device("cuda", 1)
    assert current == [1]
    with pytest.raises(
        ModelError, match=r"parallel\.dp=1, parallel\.pp=1, parallel\.tp=4: each of 4 ranks .* shows 2; use fewer"
    ):
        resolve_device(ModelConfig(), RankCoords(2, 4, device_index=2, num_sharing=4))
    with pytest.raises(ModelError, match=r"pp=2, parallel\.tp=4, cluster\.nodes=2: each of 4"):
        resolve_device(ModelConfig(), RankCoords(2, 4, 1, 2, device_index=2, num_sharing=4, num_nodes=2))
    assert resolve_device(ModelConfig(device="cpu"), RankCoords(2, 4, device_index=2)) == torch.device("cpu")


def test_an_old_gpu_is_used_without_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    gpu = resolve_device(ModelConfig())
    assert gpu == torch.device("cuda", 0)
    assert not has_kernels(gpu)
    assert "and so is slow: expected a GPU of compute capability 8.0 or more, got 7.5" in caplog.text


def test_old_gpus_refuse_8_bit_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = make_checkpoint(tmp_path / "model", "llama"), [(8, 6)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found[0])
    gpu = torch.device("cuda", 0)
    check_weight_formats(read_spec(folder), gpu)
    with pytest.raises(ModelError, match=r"8-bit floats: expected a GPU of compute capability 8\.9, got 8\.6; use a"):
        check_weight_formats(read_spec(folder, "fp8"), gpu)
    check_weight_formats(read_spec(folder, "fp8"), torch.device("cpu"))
    found[0] = 9, 0
    check_weight_formats(read_spec(folder, "fp8"), gpu)


def test_dtypes(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path / "model", "llama", torch_dtype="bfloat16"))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype(ModelConfig(), spec, cpu) == torch.float32
    assert resolve_dtype(ModelConfig(), spec, cuda) == torch.bfloat16
    assert resolve_dtype(ModelConfig(dtype="float16"), spec, cpu) == torch.float16


def test_what_the_cache_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(make_checkpoint(tmp_path / "model", "llama"))
    plain, small = CacheConfig(), CacheConfig(dtype="fp8")
    assert resolve_stored_dtype(plain, torch.bfloat16) == torch.bfloat16
    assert resolve_stored_dtype(small, torch.bfloat16) == torch.float8_e4m3fn
    assert [name_types(spec, torch.bfloat16, cache) for cache in (plain, small)] == [
        "bfloat16",
        "bfloat16, cache in fp8",
    ]
    hybrid = read_spec(make_checkpoint(tmp_path / "hybrid", "qwen3_5_text"))
    rounded = CacheConfig(state_dtype="bfloat16")
    assert [name_types(each, torch.float16, rounded) for each in (spec, hybrid)] == [
        "float16",
        "float16, states in bfloat16",
    ]
    check_stored_dtype(small, torch.device("cpu"))
    gpu = torch.device("cuda", 0)
    for capability, refused in (((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        check_stored_dtype(plain, gpu)
        with pytest.raises(ModelError, match=r"cache\.dtype=fp8: .*8\.9.*; use auto") if refused else nullcontext():
            check_stored_dtype(small, gpu)


def test_threads(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        for asked, used in ((AttentionConfig(num_threads=2), 2), (AttentionConfig(), 1)):
            config = Config(model=ModelConfig(device="cpu"), cache=CacheConfig(num_tokens=256), attention=asked)
            RunnerFactory(model_dir, read_spec(model_dir), config).build()
            assert torch.get_num_threads() == used
        monkeypatch.setattr(device, "_SMALL_PARAMETERS", 1)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
        assert [resolve_num_threads(AttentionConfig(), 2, num) for num in (1, 2, 3, 16)] == [8, 4, 2, 1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("num_sharing", "num_threads"), [(1, 8), (3, 2), (16, 1)])
def test_large_models_share_all_cores(monkeypatch: pytest.MonkeyPatch, num_sharing: int, num_threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert resolve_num_threads(AttentionConfig(), 16_000_000, num_sharing) == num_threads
