from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases.models import make_checkpoint
from toka_async.attention.modules import ModuleRequest
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.config import AttentionConfig, Config, ModelConfig, ParallelConfig
from toka_async.startup import without_gpu
from toka_async.startup.progress import StartupProgress

Warm = Callable[..., list[ModuleRequest]]


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Warm:
    """Compiles for a model, and returns what was asked of FlashInfer."""
    asked: list[ModuleRequest] = []
    monkeypatch.setattr(without_gpu, "explain_no_flashinfer", lambda *_: "")
    monkeypatch.setattr(without_gpu, "compile_now", lambda request, _: asked.append(request))
    folder = make_checkpoint(tmp_path, "llama", torch_dtype="bfloat16", num_attention_heads=8, num_key_value_heads=2)

    def compile_modules(architectures: str, **sections: Any) -> list[ModuleRequest]:
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", architectures)
        without_gpu.compile_without_gpu(read_spec(folder), Config(**sections), StartupProgress(logged=False))
        return asked

    return compile_modules


def test_the_modules_of_the_named_gpus_are_compiled(warm: Warm, caplog: pytest.LogCaptureFixture) -> None:
    (request,) = warm("9.0a")
    assert (request.architectures, request.dtype, request.tensor_cores) == ("9.0a", "bfloat16", True)
    assert "FlashInfer's modules are compiled for 9.0a; there is no GPU here" in caplog.text


def test_they_are_those_of_a_tensor_rank(warm: Warm) -> None:
    """Of 8 query and 2 key heads, each of 8 ranks has one and a key head."""
    requests = warm("9.0a", parallel=ParallelConfig(tp=8), model=ModelConfig(dtype="float16"))
    assert [(request.dtype, request.tensor_cores) for request in requests] == [("float16", False)]


@pytest.mark.parametrize(
    ("architectures", "sections", "advises"),
    [
        ("", {}, True),
        ("9.0a", {"attention": AttentionConfig(backend="triton")}, False),
        ("9.0a", {"model": ModelConfig(batch_invariant=True)}, False),
    ],
    ids=["no GPU is named", "another backend", "batch invariant"],
)
def test_otherwise_it_says_that_nothing_is_done(
    warm: Warm, architectures: str, sections: dict[str, Any], advises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The variable is advised only where it would help."""
    assert warm(architectures, **sections) == []
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("there is no GPU here, so nothing is compiled or measured")
    assert ("FLASHINFER_CUDA_ARCH_LIST" in line) is advises


def test_a_failure_is_the_users_to_mend(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setattr(without_gpu, "compile_now", fail)
    with pytest.raises(
        ModelError, match=r"^FLASHINFER_CUDA_ARCH_LIST=9.0a: .* be compiled: Could not find nvcc; unset"
    ):
        warm("9.0a")
    monkeypatch.setattr(without_gpu, "explain_no_flashinfer", lambda *_: "it is not installed; use auto")
    with pytest.raises(ModelError, match=r"installed; unset the variable, or use attention.backend=triton$"):
        warm("9.0a")
