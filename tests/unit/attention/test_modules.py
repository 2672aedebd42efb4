"""Which of FlashInfer's modules a model needs, which of them are missing, and that all are compiled once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cases.models import make_checkpoint
from tests.fakes.flashinfer_jit import FakeJit
from toka_async.attention.modules import (
    ModuleRequest,
    compile_missing,
    find_missing,
    list_architectures,
    make_module_request,
)
from toka_async.checkpoint.spec import read_spec


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeJit:
    monkeypatch.setenv("MAX_JOBS", "99")
    return FakeJit(monkeypatch, tmp_path)


def request_of(**changed: Any) -> ModuleRequest:
    values: dict[str, Any] = {
        "architectures": "8.0",
        "dtype": "bfloat16",
        "stored": "bfloat16",
        "head_dim": 64,
        "windowed": (False,),
        "tensor_cores": True,
    }
    return ModuleRequest(**values | changed)


def names_of_missing(**changed: Any) -> list[str]:
    return [spec.name for spec in find_missing(request_of(**changed))]


@pytest.mark.usefixtures("jit")
def test_what_a_model_needs() -> None:
    fa2, fa3 = (f"prefill {backend} torch.bfloat16 64 False" for backend in ("fa2", "fa3"))
    assert names_of_missing() == ["cascade", fa2]
    assert names_of_missing(architectures="9.0a") == ["cascade", fa2, fa3]
    assert names_of_missing(architectures="9.0a", tensor_cores=False) == ["cascade", fa3, "decode 64 False"]
    assert names_of_missing(architectures="8.0 9.0a", tensor_cores=False) == ["cascade", fa2, fa3, "decode 64 False"]
    assert names_of_missing(windowed=(False, True)) == ["cascade", fa2, fa2.replace("False", "True")]
    assert names_of_missing(dtype="float16")[1] == "prefill fa2 torch.float16 64 False"
    assert names_of_missing(architectures="9.0a", stored="float8_e4m3fn") == ["cascade", fa2]


def test_the_request_for_a_model(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "mistral", sliding_window=7))
    request = make_module_request(spec, "float16", "float8_e4m3fn", "9.0a")
    assert request == ModuleRequest(
        architectures="9.0a",
        dtype="float16",
        stored="float8_e4m3fn",
        head_dim=spec.attention.head_dim,
        windowed=(False, True),
        tensor_cores=spec.attention.num_heads // spec.attention.num_kv_heads >= 4,
    )


@pytest.mark.usefixtures("jit")
def test_the_architectures_of_the_gpus_here() -> None:
    assert list_architectures() == "8.0 9.0a"


def test_what_is_built_is_not_missing(jit: FakeJit) -> None:
    assert len(names_of_missing()) == 2
    jit.build_all(lambda name: name == "cascade")
    assert names_of_missing() == ["prefill fa2 torch.bfloat16 64 False"]
    jit.build_all()
    assert names_of_missing() == []


def test_a_library_that_ninja_would_build_again_is_missing(jit: FakeJit) -> None:
    names_of_missing()
    jit.build_all()
    jit.specs["cascade"].library.write_text("stale")
    assert names_of_missing() == ["cascade"]
    jit.specs["cascade"].is_aot = True  # comes with a package
    assert names_of_missing() == []


def test_each_missing_module_is_compiled_once(jit: FakeJit, monkeypatch: pytest.MonkeyPatch) -> None:
    names_of_missing()
    jit.build_all(lambda name: name == "cascade")
    built: list[tuple[str, str | None]] = []
    for name, spec in jit.specs.items():
        monkeypatch.setattr(spec, "build", lambda _, name=name: built.append((name, os.environ.get("MAX_JOBS"))))
    compile_missing(request_of(), lambda *_: None, 3)
    assert built == [("prefill fa2 torch.bfloat16 64 False", "3")]
    jit.specs["prefill fa2 torch.bfloat16 64 False"].library.parent.mkdir()
    jit.specs["prefill fa2 torch.bfloat16 64 False"].library.touch()
    compile_missing(request_of(), lambda *_: None, 3)
    assert len(built) == 1


def test_files_are_counted(jit: FakeJit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two objects and a library of each module. The last one waits until the others were shown."""
    import threading

    from toka_async.attention import modules

    monkeypatch.setattr(modules, "_LOOK_SECONDS", 0.01)
    names_of_missing()
    is_shown, shown = threading.Event(), list[tuple[int, int]]()
    last = jit.specs["cascade"]
    build = last.build

    def wait_and_build(verbose: bool) -> None:
        assert is_shown.wait(60)
        build(verbose)

    def show(done: int, total: int) -> None:
        shown.append((done, total))
        if done == 3:
            is_shown.set()

    monkeypatch.setattr(last, "build", wait_and_build)
    compile_missing(request_of(), show, 1)
    assert (3, 6) in shown
    assert names_of_missing() == []


def test_a_failure_is_raised_and_the_others_are_built(jit: FakeJit, monkeypatch: pytest.MonkeyPatch) -> None:
    names_of_missing()

    def fail(_: bool) -> None:
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setattr(jit.specs["cascade"], "build", fail)
    with pytest.raises(RuntimeError, match="Could not find nvcc"):
        compile_missing(request_of(), lambda *_: None, 1)
    assert names_of_missing() == ["cascade"]
