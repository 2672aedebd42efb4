"""What is known of a model before it is built, and why some cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.cases.foreign_models import make_foreign
from tests.cases.models import make_checkpoint
from toka_async.checkpoint.cost import count_stage_bytes
from toka_async.checkpoint.division import check_division, make_rank_spec
from toka_async.checkpoint.json_file import ModelError
from toka_async.checkpoint.spec import read_spec
from toka_async.transformers.describe import describe

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def write_config(folder: Path, model_type: str, **fields: Any) -> Path:
    AutoConfig.for_model(model_type, **SMALL | fields).save_pretrained(folder)
    return folder


def test_a_native_family_has_the_same_shape(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral", sliding_window=33, tie_word_embeddings=True, attention_bias=True)
    native, foreign = read_spec(folder), describe(folder, trust_remote_code=False)
    assert foreign.impl == "transformers"
    assert foreign.windows == native.windows == (33, 33)
    for name in ("vocab_size", "hidden_size", "max_context", "dtype", "eos_token_ids", "tie_embeddings"):
        assert getattr(foreign, name) == getattr(native, name), name
    for name in ("num_heads", "num_kv_heads", "head_dim", "cached_values"):
        assert getattr(foreign.attention, name) == getattr(native.attention, name), name
    sizes = [count_stage_bytes(spec, is_first=True, is_last=True, itemsize=4) for spec in (native, foreign)]
    assert sizes[0] == sizes[1]


def test_ranks_divide_what_the_plan_divides(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path, "cohere")
    spec = describe(folder, trust_remote_code=False, tp=2)
    check_division(spec, 3, 2)
    part = make_rank_spec(spec, 2)
    assert (part.attention.num_heads, part.attention.num_kv_heads) == (3, 1)
    matrices = [matrix.num_outputs * matrix.num_inputs for matrix in spec.list_matrices(0)]
    assert [matrix.num_outputs * matrix.num_inputs * 2 for matrix in part.list_matrices(0)] == matrices


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("falcon", {}, "no attention interface"),
        ("bloom", {}, "no attention interface"),
        ("mamba", {}, "keep a state"),
        ("bert", {}, "see others than all before them"),
        ("t5", {}, "encoder-decoder"),
        ("roberta", {"is_decoder": True}, "which tokens are padding"),
        ("bert", {"is_decoder": True}, ""),
        ("doge", {}, "masks of its own"),
        ("hrm_text", {"num_key_value_heads": 2}, "attends several times|times attention"),
        ("llama", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000: expected at most 4096"),
        ("starcoder2", {"num_key_value_heads": 3}, "its 4 heads are no multiple of its 3 KV heads"),
        ("llama", {"num_key_value_heads": 2}, ""),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    tmp_path: Path, model_type: str, fields: dict[str, Any], reason: str
) -> None:
    folder = write_config(tmp_path, model_type, **fields)
    if not reason:
        assert describe(folder, trust_remote_code=False).num_layers == 2
        return
    with pytest.raises(ModelError, match=reason) as raised:
        describe(folder, trust_remote_code=False)
    assert repr(model_type) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_field_of_another_type_is_named_with_what_it_should_be(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "starcoder2", **SMALL, "hidden_size": "32"}))
    with pytest.raises(ModelError, match=r"'hidden_size': TypeError: .*expected int, got str") as raised:
        describe(tmp_path, trust_remote_code=False)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("model_type", "tp", "pp", "reason"),
    [
        ("stablelm", 2, 1, "parallel.tp=2: .*; use 1"),
        ("stablelm", 1, 2, "parallel.pp=2: .*; use 1"),
        ("cohere", 4, 1, "parallel.tp=4: .*; use 1"),
    ],
)
def test_a_division_without_a_plan_is_refused(tmp_path: Path, model_type: str, tp: int, pp: int, reason: str) -> None:
    folder = make_foreign(tmp_path, model_type)
    with pytest.raises(ModelError, match=reason):
        describe(folder, trust_remote_code=False, tp=tp, pp=pp)


def test_code_of_the_repository_runs_only_if_trusted(tmp_path: Path) -> None:
    """The folder's code is a copy of a family under another name."""
    fields = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"num_key_value_heads": 2} | fields))
    (tmp_path / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(ModelError, match=r"model\.trust_remote_code=true"):
        describe(tmp_path, trust_remote_code=False)
    assert describe(tmp_path, trust_remote_code=True).attention.num_kv_heads == 2


def test_a_changing_rope_limits_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    folder = write_config(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=256)
    assert describe(folder, trust_remote_code=False).max_context == 64
