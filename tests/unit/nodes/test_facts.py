from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from toka_async.nodes.facts import collect_model_facts, collect_versions, find_difference

DEMO = Path(__file__).parents[3] / "toka_async" / "demo"


def test_versions_are_told_with_the_code() -> None:
    facts = collect_versions()
    assert {"torch", "nccl", "python", "toka-async"} <= facts.keys()
    assert facts == collect_versions()
    assert ", code " in facts["toka-async"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_another_file_is_a_difference(tmp_path: Path, name: str) -> None:
    model = shutil.copytree(DEMO, tmp_path / "model")
    facts = collect_model_facts(model, with_weights=True)
    assert facts == collect_model_facts(DEMO, with_weights=True)
    content = (model / name).read_bytes()
    (model / name).write_bytes(content[:20] + b" " + content[20:])
    assert find_difference(facts, collect_model_facts(model, with_weights=True)).startswith(f"{name} is ")


def test_files_of_weights_that_are_not_loaded_do_not_count(tmp_path: Path) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    shutil.copy(DEMO / "generation_config.json", tmp_path)
    assert collect_model_facts(tmp_path, with_weights=False) == collect_model_facts(DEMO, with_weights=False)


def test_the_first_difference_is_named() -> None:
    assert find_difference({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == ""
    assert find_difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "b is 3, and the leader's is 2"
    assert find_difference({}, {"c": "3"}) == "c is 3, and the leader's is none"
