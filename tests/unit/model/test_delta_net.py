from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cases.models import make_checkpoint
from tests.cases.quantized import BLOCKS, CHANNELS, dequantize_checkpoint, quantize_checkpoint
from tests.drivers.engine import Engine
from toka_async.checkpoint.spec import read_spec
from toka_async.model.delta_net import DeltaNet
from toka_async.model.matrices.dense import DenseMatrix
from toka_async.model.matrices.fp8 import Fp8Matrix
from toka_async.model.weights import build_decoder, load_weights

_SIZES = ("hidden", "intermediate", "moe_intermediate", "shared_expert_intermediate")
_HEADS = ("head", "linear_key_head", "linear_value_head")
WHOLE_BLOCKS: dict[str, Any] = {f"{name}_size": 128 for name in _SIZES} | {f"{name}_dim": 128 for name in _HEADS}
PUBLISHED = {"blocks": (BLOCKS, "modules_to_not_convert"), "channels": (CHANNELS, "ignore")}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_one_matrix_has_all_that_is_made_of_the_input(tmp_path: Path, family: str, rank: int) -> None:
    folder = make_checkpoint(tmp_path, family, linear_num_key_heads=2, linear_num_value_heads=4)
    spec = read_spec(folder)
    decoder = build_decoder(spec, torch.float32, torch.device("cpu"), SimpleNamespace(rank=rank, size=2))
    load_weights(decoder, folder)
    mixer, shape = decoder.list_layers()[0].mixer, spec.recurrences[0]
    assert isinstance(mixer, DeltaNet)
    assert isinstance(mixer.inputs, DenseMatrix)
    assert mixer.gates is None
    stored, prefix = load_file(folder / "model.safetensors"), "model.layers.0.linear_attn.in_proj"
    key, value = shape.key_dim, shape.value_dim
    if family == "qwen3_5_text":
        qkv, z, b, a = (stored[f"{prefix}_{each}.weight"] for each in ("qkv", "z", "b", "a"))
        parts = [*torch.split(qkv, [2 * key, 2 * key, 4 * value]), z, b, a]
        expected = [part.chunk(2)[rank] for part in parts]
    else:  # the rank's head of keys, with its two of values
        expected = [stored[f"{prefix}_{each}.weight"].chunk(2)[rank] for each in ("qkvz", "ba")]
    assert torch.equal(mixer.inputs.plain, torch.cat(expected))


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
@pytest.mark.parametrize("kind", PUBLISHED)
def test_gates_that_are_not_quantized_are_a_product_of_their_own(tmp_path: Path, family: str, kind: str) -> None:
    config, field = PUBLISHED[kind]
    names = [f"model.layers.{layer}.linear_attn.in_proj_{each}" for layer in range(9) for each in ("b", "a", "ba")]
    dense = make_checkpoint(tmp_path / "dense", family, **WHOLE_BLOCKS)
    folder = quantize_checkpoint(dense, tmp_path / "quantized", config | {field: [*config[field], *names]})
    answers = []
    for each in (folder, dequantize_checkpoint(folder, tmp_path / "exact")):
        answers.append(Engine(each).run([[5, 9, 3]], max_tokens=5)[0].samples[0].token_ids)
        mixer = load_mixer(each)
        assert isinstance(mixer.inputs, Fp8Matrix) == isinstance(mixer.gates, DenseMatrix) == (each == folder)
    assert answers[0] == answers[1]


def test_layers_that_are_not_quantized_have_one_product(tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", "qwen3_5_text", **WHOLE_BLOCKS)
    names = {"modules_to_not_convert": ["lm_head", "linear_attn"]}
    mixer = load_mixer(quantize_checkpoint(dense, tmp_path / "quantized", BLOCKS | names))
    assert isinstance(mixer.inputs, DenseMatrix)
    assert mixer.gates is None


def load_mixer(folder: Path) -> DeltaNet:
    decoder = build_decoder(read_spec(folder), torch.float32, torch.device("cpu"))
    load_weights(decoder, folder)
    mixer = decoder.list_layers()[0].mixer
    assert isinstance(mixer, DeltaNet)
    return mixer
