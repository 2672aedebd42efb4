"""The whole server, started from a configuration file on a checkpoint on disk, gives the reference's greedy tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.models import make_checkpoint
from tests.processes.greedy_reference import ask_all, check_greedy
from tests.processes.serving import serving

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(("config", "family"), [("qwen.toml", "qwen2"), ("llama-1b.toml", "llama")])
def test_greedy_tokens_over_http_equal_the_reference(tmp_path: Path, config: str, family: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family, seed=3, tie_word_embeddings=True)
    options = (
        "--config",
        str(CONFIGS / config),
        f"model.path={folder}",
        "model.served_name=m",
        "model.max_context=auto",
    )
    with serving(tmp_path, *options) as server:
        answers = ask_all(server)
    check_greedy(folder, answers)
