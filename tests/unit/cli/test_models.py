"""`toka-async models`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cases.foreign_models import make_foreign
from tests.cases.models import GEMMA4_SMALL, make_checkpoint
from toka_async import cli
from toka_async.checkpoint import implementation
from toka_async.checkpoint.implementation import Architecture, LibraryAnswer, LibraryQuestion
from toka_async.transformers.__main__ import answer


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit code, standard output)."""
    code = cli.main(("models", *arguments))
    return code, capsys.readouterr().out


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers at once."""
    known = (
        Architecture("bloom", "BloomForCausalLM", "its code has no attention interface"),
        Architecture("llama", "LlamaForCausalLM"),
        Architecture("starcoder2", "Starcoder2ForCausalLM"),
    )

    def ask(question: LibraryQuestion) -> LibraryAnswer:
        return LibraryAnswer(architectures=known) if not question.model_dir else LibraryAnswer(error="no such model")

    monkeypatch.setattr("toka_async.cli.models.ask_library", ask)  # first: an import would keep the other
    monkeypatch.setattr(implementation, "ask_library", ask)


@pytest.mark.usefixtures("library")
def test_all_models_are_listed_by_whose_code_computes_them(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys)
    assert code == 0
    _, native, through, not_at_all = out.split("\n\n")
    assert "llama" in native
    assert "starcoder2" in through
    assert "llama" not in through
    assert "no attention interface\n  bloom" in not_at_all
    listed = json.loads(run(capsys, "--json")[1])
    assert {"llama", "qwen3_moe"} <= set(listed["native"])
    assert [each["model_type"] for each in listed["transformers"]] == ["bloom", "starcoder2"]


def test_without_the_library_the_list_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "find_spec", lambda _name: None)
    through, problem = run(capsys)[1].splitlines()[-1].split("): ")
    assert through == "through transformers (model.impl=transformers"
    assert problem == "the library transformers is not installed: pip install 'toka-async[transformers]'"


def test_a_native_model_is_described(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16")
    code, out = run(capsys, str(folder))
    assert code == 0
    assert "would run: natively" in out
    assert "2 layers, bfloat16" in out
    report = json.loads(run(capsys, str(folder), "--json", "model.quantize=fp8")[1])
    assert (report["impl"], report["problem"]) == ("native", "")
    assert report["weights"] == "bfloat16, weights in fp8/channel"
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 2
    assert json.loads(run(capsys, str(folder), "--json", "cache.dtype=fp8")[1])["kv_bytes_per_token"] == 2 * 2 * 2 * 8


def test_a_division_that_is_impossible_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(make_checkpoint(tmp_path, "qwen3", dtype="bfloat16"))
    code, out = run(capsys, folder, "parallel.tp=3")
    assert code == 2
    assert "would be refused: parallel.tp=3: " in out
    assert "parallel.ep=2: the model has no experts; use 1" in run(capsys, folder, "parallel.tp=2", "parallel.ep=2")[1]


@pytest.fixture
def loaded_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers in this process."""
    monkeypatch.setattr(implementation, "ask_library", answer)


@pytest.mark.usefixtures("loaded_library")
def test_what_would_be_refused_is_said_with_the_reason_and_a_way_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, "llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    code, out = run(capsys, str(folder))
    assert code == 2
    assert "would be refused: " in out
    assert "'dynamic' is not supported" in out
    assert out.endswith("\nmodel.impl=transformers would run it\n")
    folder = make_checkpoint(tmp_path / "other", "gemma4_text", **GEMMA4_SMALL, enable_moe_block=True)
    out = run(capsys, str(folder))[1]
    assert "enable_moe_block is True" in out
    assert "\nmodel.impl=transformers cannot run it either: " in out


@pytest.mark.usefixtures("loaded_library")
def test_a_foreign_model_is_described(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out = run(capsys, str(make_foreign(tmp_path, "starcoder2")), "--json")
    report = json.loads(out)
    assert (code, report["impl"], report["num_layers"], report["max_context"]) == (0, "transformers", 3, 512)
    assert report["weight_bytes"] > 0


@pytest.mark.usefixtures("library")
def test_a_foreign_model_may_be_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    report = json.loads(run(capsys, str(tmp_path), "--json")[1])
    assert (report["impl"], report["problem"]) == ("transformers", "no such model")
    assert run(capsys, str(tmp_path))[0] == 2


def test_a_missing_folder_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(("models", str(tmp_path / "none"))) == 2
    assert "no such directory" in capsys.readouterr().err
