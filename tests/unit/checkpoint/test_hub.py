from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from toka_async.checkpoint.hub import resolve_model, resolve_tokenizer
from toka_async.checkpoint.spec import ModelError, read_spec


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model("~/model") == tmp_path / "model"


def test_demo_is_in_the_package() -> None:
    assert read_spec(resolve_model("demo")).family == "qwen2"


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert "original/*" in ignore_patterns
        asked[repo] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("Some-Org/some_model-1.5B") == tmp_path
    assert "*.safetensors" in asked["Some-Org/some_model-1.5B"]
    assert resolve_model("simulated/model", weights=False) == tmp_path
    assert "*.safetensors" not in asked["simulated/model"]
    assert resolve_tokenizer("some-tokenizer", Path("/model")) == tmp_path
    assert "*.safetensors" not in asked["some-tokenizer"]


def test_the_hub_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise RuntimeError("404 Client Error.\n\nRepository not found")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError) as caught:
        resolve_model("some/model")
    message = str(caught.value)
    assert message.startswith("model.path=some/model: neither a directory nor a model that the hub")
    assert "404 Client Error. Repository not found" in message
    assert "\n" not in message


@pytest.mark.parametrize("path", ["/no/such/directory", "./no", "../no", "a/b/c", "~/no", "some model", ""])
def test_what_cannot_be_a_hub_id(path: str) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model(path)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is a file; give the directory"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_the_tokenizer_is_the_models_own(tmp_path: Path) -> None:
    assert resolve_tokenizer("", Path("/model")) == Path("/model")
    assert resolve_tokenizer(str(tmp_path), Path("/model")) == tmp_path
    with pytest.raises(ModelError, match=r"model\.tokenizer=/no/such: no such directory"):
        resolve_tokenizer("/no/such", Path("/model"))


def test_gguf_files_are_named_as_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ModelError, match="GGUF files are not supported; give the directory or hub id"):
            resolve_model(str(path))
    (tmp_path / "config.json").touch()  # the original is beside it
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_gated_model_needs_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise RuntimeError("403 Client Error. Cannot access gated repo")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match="accept its licence there, then `hf auth login`"):
        resolve_model("some/model")
