"""Whose code computes a model, and what is refused before anything is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.cases.models import make_checkpoint
from toka_async.checkpoint import implementation
from toka_async.checkpoint.implementation import LibraryQuestion, ask_library, choose_implementation, read_model
from toka_async.checkpoint.json_file import ModelError
from toka_async.config import ModelConfig, ParallelConfig
from toka_async.transformers.__main__ import answer


def write_config(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    ("impl", "model_type", "chosen"),
    [
        ("auto", "llama", "native"),
        ("auto", "starcoder2", "transformers"),
        ("transformers", "llama", "transformers"),
        ("native", "starcoder2", "native"),
    ],
)
def test_a_native_family_is_computed_natively_unless_asked(
    tmp_path: Path, impl: Any, model_type: str, chosen: str
) -> None:
    assert choose_implementation(write_config(tmp_path, model_type=model_type), ModelConfig(impl=impl)) == chosen


def test_without_the_library_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "find_spec", lambda _name: None)
    folder = write_config(tmp_path, model_type="starcoder2")
    impls: tuple[Literal["auto", "transformers"], ...] = ("auto", "transformers")
    for impl in impls:
        with pytest.raises(ModelError, match=r"pip install 'toka-async\[transformers\]'"):
            read_model(folder, ModelConfig(impl=impl), ParallelConfig())


@pytest.mark.parametrize(
    ("model", "parallel", "name"),
    [
        ({"quantize": "fp8"}, {}, "model.quantize=fp8"),
        ({"batch_invariant": True}, {}, "model.batch_invariant=True"),
        ({}, {"ep": 2, "tp": 2}, "parallel.ep=2"),
    ],
)
def test_what_needs_our_layers_is_refused_by_name(
    tmp_path: Path, model: dict[str, Any], parallel: dict[str, Any], name: str
) -> None:
    with pytest.raises(ModelError, match=name):
        read_model(tmp_path, ModelConfig(impl="transformers", **model), ParallelConfig(**parallel))


def test_the_library_describes_a_model_and_lists_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has loaded it; tests of servers have the other one."""
    monkeypatch.setattr(implementation, "ask_library", answer)
    folder = make_checkpoint(tmp_path, "llama")
    spec = read_model(folder, ModelConfig(impl="transformers"), ParallelConfig(tp=2))
    assert (spec.impl, spec.num_layers, spec.attention.num_kv_heads) == ("transformers", 2, 2)
    known = {each.model_type: each.problem for each in answer(LibraryQuestion()).architectures}
    assert known["starcoder2"] == known["llama"] == ""
    assert "state" in known["mamba"]
    assert "attention interface" in known["bloom"]
    write_config(folder, model_type="nothing")
    with pytest.raises(ModelError, match="nothing"):
        read_model(folder, ModelConfig(impl="transformers"), ParallelConfig())


def test_a_library_that_fails_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "MODULE", "toka_async.nothing")
    with pytest.raises(ModelError, match=r"could not describe the model: .*: No module named toka_async\.nothing$"):
        ask_library(LibraryQuestion(model_dir="m"))
