from __future__ import annotations

import json
from pathlib import Path

import pytest

from toka_async.checkpoint.json_file import JsonFile
from toka_async.checkpoint.text_part import find_text_config, find_text_name


def test_the_text_part_has_what_the_whole_says() -> None:
    whole = {
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
        "vision_config": {"depth": 3},
        "text_config": {"model_type": "qwen3_5_text", "hidden_size": 8, "dtype": None, "tie_word_embeddings": False},
    }
    text = find_text_config(JsonFile(Path("config.json"), whole))
    assert text.fields == {
        "model_type": "qwen3_5_text",
        "hidden_size": 8,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
    }


def test_a_model_of_text_alone_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_next"}))
    file = JsonFile(path)
    assert find_text_config(file) is file


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("model.language_model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("model.visual.merger.norm.bias", "model.visual.merger.norm.bias"),
    ],
)
def test_names(name: str, own: str) -> None:
    assert find_text_name(name) == own
