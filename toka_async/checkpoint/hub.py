"""Finds the files of a model or tokenizer: built in, in a local directory, or downloaded from the hub.

Knows names and folders; reads none of the files.
"""

from __future__ import annotations

import re
from pathlib import Path

from toka_async.checkpoint.json_file import ModelError

DEMO = "demo"
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
TOKENIZER_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja"]
# Copies of the same weights in other formats, which some repositories have too.
IGNORED = ["original/*", "consolidated*.safetensors"]
GGUF = (
    "GGUF files are not supported; give the directory or hub id of the original model, with config.json and "
    "*.safetensors"
)
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve_model(path: str, weights: bool = True) -> Path:
    """Returns the directory of `demo` (the built-in model), of a directory, or of a hub id.

    Downloads a hub id when needed, without weights unless they are wanted. Raises ModelError when there is no model.
    """
    return _resolve(path, "model.path", PATTERNS if weights else TOKENIZER_PATTERNS)


def resolve_tokenizer(path: str, model_dir: Path) -> Path:
    """Returns the directory of the tokenizer's files, the model's if `path` is empty. Raises ModelError."""
    return _resolve(path, "model.tokenizer", TOKENIZER_PATTERNS) if path else model_dir


def _resolve(path: str, field: str, patterns: list[str]) -> Path:
    if path == DEMO:
        return Path(__file__).parent.parent / "demo"
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        return _refuse_gguf(folder, f"{field}={path}")
    if path and folder.exists():
        raise ModelError(f"{field}={path}: {_wrong_file(folder)}")
    if not HUB_ID.fullmatch(path) or path.startswith("."):
        raise ModelError(f"{field}={path}: no such directory")
    return _refuse_gguf(_download(path, field, patterns), f"{field}={path}")


def _wrong_file(path: Path) -> str:
    """Says what to give instead of a file."""
    if path.suffix == ".gguf":
        return GGUF
    return f"is a file; give the directory that holds it, with config.json ({path.parent})"


def _refuse_gguf(folder: Path, what: str) -> Path:
    """Raises ModelError for a folder of GGUF files, which otherwise would only seem to miss config.json."""
    if not (folder / "config.json").exists() and next(folder.glob("*.gguf"), None) is not None:
        raise ModelError(f"{what}: {GGUF}")
    return folder


def _download(path: str, field: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=patterns, ignore_patterns=IGNORED))
    except Exception as error:  # the hub's own, its HTTP client's and the system's errors have nothing in common
        reason = " ".join(str(error).split()) or type(error).__name__
        advice = "; accept its licence there, then `hf auth login` or set HF_TOKEN" if _is_gated(reason) else ""
        raise ModelError(
            f"{field}={path}: neither a directory nor a model that the hub lets us download ({reason[:300]}){advice}"
        ) from None


def _is_gated(reason: str) -> bool:
    return any(word in reason for word in ("gated", "401", "403"))
