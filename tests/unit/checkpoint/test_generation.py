from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases.models import END_ID, make_checkpoint
from toka_async.checkpoint.generation import GenerationDefaults, read_generation_defaults
from toka_async.checkpoint.spec import ModelError, read_spec


def read(folder: Path, use_file: bool = True, **fields: Any) -> GenerationDefaults:
    make_checkpoint(folder, "llama")
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return read_generation_defaults(folder, read_spec(folder), use_file)


def test_no_file(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "llama"))
    assert read_generation_defaults(tmp_path, spec, use_file=True) == GenerationDefaults(eos_token_ids=(END_ID,))


def test_what_is_there_is_taken(tmp_path: Path) -> None:
    defaults = read(
        tmp_path, do_sample=True, temperature=0.7, top_p=0.8, top_k=20, min_p=0, repetition_penalty=1.05, eos_token_id=9
    )
    assert defaults == GenerationDefaults(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.0, repetition_penalty=1.05, eos_token_ids=(9,)
    )


def test_what_is_absent_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, do_sample=False, top_p=None, eos_token_id=[7, 8]) == GenerationDefaults(eos_token_ids=(7, 8))


def test_end_tokens_fall_back_to_the_model(tmp_path: Path) -> None:
    assert read(tmp_path, temperature=0.5).eos_token_ids == (END_ID,)
    assert read(tmp_path, eos_token_id=[]).eos_token_ids == (END_ID,)


def test_without_the_file_only_end_tokens_count(tmp_path: Path) -> None:
    assert read(tmp_path, False, temperature=0.5, eos_token_id=3) == GenerationDefaults(eos_token_ids=(3,))


def test_no_top_k(tmp_path: Path) -> None:
    assert read(tmp_path, top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5: expected at most 1; or set model.generation_config=none"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_wrong_values(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, **fields)
    assert problem in str(caught.value)


def test_a_corrupt_file(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "llama"))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json: is not valid JSON"):
        read_generation_defaults(tmp_path, spec, use_file=True)
