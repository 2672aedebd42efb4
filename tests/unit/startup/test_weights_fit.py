from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases.models import make_checkpoint
from toka_async.checkpoint.division import stage_parts
from toka_async.checkpoint.spec import ModelError, ModelSpec, read_spec
from toka_async.config import Config, ModelConfig
from toka_async.model.weights import build_decoder
from toka_async.startup import weights_fit
from toka_async.startup.runner_factory import RunnerFactory
from toka_async.startup.weights_fit import catch_lost_memory, check_weights_fit, count_rank_bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama", torch_dtype="bfloat16")


@pytest.fixture
def spec(model: Path) -> ModelSpec:
    return read_spec(model)


def check(spec: ModelSpec, free: int, kind: str, dtype: torch.dtype = torch.bfloat16, pp: int = 1) -> None:
    for part in stage_parts(spec, pp, 1):
        check_weights_fit(spec, part, 1, dtype, free, kind)


def whole(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> int:
    return count_rank_bytes(spec, stage_parts(spec, 1, 1)[0], 1, dtype)


def test_the_size_is_that_of_the_parameters(spec: ModelSpec) -> None:
    decoder = build_decoder(spec, torch.float32, torch.device("meta"))
    assert whole(spec, torch.float32) == 4 * sum(parameter.numel() for parameter in decoder.parameters())


def test_what_fits_is_not_refused(spec: ModelSpec) -> None:
    check(spec, whole(spec) + 1, "cuda")
    check(spec, whole(spec) - 1, "cuda", pp=2)


def test_on_a_cpu_half_the_type_may_do(spec: ModelSpec) -> None:
    size = whole(spec, torch.float32)
    with pytest.raises(ModelError, match=r"GiB of weights in float32 where .* set model\.dtype=bfloat16"):
        check(spec, size - 1, "cpu", torch.float32)
    with pytest.raises(ModelError, match="use a smaller model"):
        check(spec, size // 2, "cpu", torch.float32)


def test_on_a_gpu_more_of_them_may_do(spec: ModelSpec) -> None:
    with pytest.raises(ModelError, match=r"does not fit into the GPU's memory: .*; set parallel\.tp=2 \(or"):
        check(spec, whole(spec) - 1, "cuda")
    with pytest.raises(ModelError, match="use a smaller model"):
        check(spec, 100, "cuda")


@pytest.mark.parametrize(
    "error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_memory_that_others_took_meanwhile(spec: ModelSpec, error: RuntimeError) -> None:
    (part,) = stage_parts(spec, 1, 1)
    with pytest.raises(ModelError, match="no memory left for"), catch_lost_memory(spec, part, 1, torch.float32):
        raise error
    with pytest.raises(RuntimeError, match="something else"), catch_lost_memory(spec, part, 1, torch.float32):
        raise RuntimeError("something else")


def test_it_is_refused_before_anything_is_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_fit, "read_available_memory", lambda: 1000)
    for path in model.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ModelError, match="this model does not fit into memory"):
        RunnerFactory(model, read_spec(model), Config(model=ModelConfig(device="cpu")))
