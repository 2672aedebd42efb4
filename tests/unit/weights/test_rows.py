"""Rows that ranks have, put together as a server does, are those of the checkpoint's file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.cases.models import heads, make_checkpoint
from tests.cases.quantized import BLOCKS, CHANNELS, SIZES, quantize_checkpoint
from toka_async.checkpoint.division import group_experts, stage_parts
from toka_async.checkpoint.spec import read_spec
from toka_async.model.matrices.part import WeightPart
from toka_async.model.matrices.scaling import FP8
from toka_async.model.weights import build_decoder, load_weights
from toka_async.server.engine.control import add_parts, join_rows
from toka_async.weights import rows
from toka_async.weights.catalog import UpdateError
from toka_async.weights.checksums import sum_parts
from toka_async.weights.rows import read_rows

Ranks = list[dict[str, WeightPart]]
DIVIDED = heads(4, 1, 48, head_dim=8)  # two ranks have the same keys and values
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": DIVIDED | {"attention_bias": True, "tie_word_embeddings": True},
    "phi3": heads(4, 2, 32, head_dim=8),
    "qwen3_moe": DIVIDED,
    "gpt_oss": {},
    "gemma3_text": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
}


def load_ranks(folder: Path, tp: int = 1, pp: int = 1, ep: int = 1, quantize: str = "none") -> Ranks:
    """The parts of each rank."""
    spec, ranks = group_experts(read_spec(folder, quantize), ep), Ranks()
    for stage in stage_parts(spec, pp, tp):
        for rank in range(tp):
            place: Any = SimpleNamespace(rank=rank, size=tp)
            decoder = build_decoder(spec, torch.float32, torch.device("cpu"), place, part=stage)
            load_weights(decoder, folder)
            ranks.append(dict(decoder.parts()))
    return ranks


def read(ranks: Ranks, name: str, num_rows: int) -> Tensor:
    found = [each for parts in ranks if name in parts for each in read_rows(name, parts[name], num_rows)]
    return torch.from_numpy(join_rows(name, found))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, layout) for family in FAMILIES for layout in ({}, {"tp": 2}, {"tp": 2, "pp": 2})),
        *((family, {"tp": 2, "ep": 2}) for family in ("qwen3_moe", "gpt_oss")),
    ],
    ids=str,
)
def test_all_tensors(tmp_path: Path, family: str, layout: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path, family, **FAMILIES[family])
    ranks, stored = load_ranks(folder, **layout), load_file(folder / "model.safetensors")
    assert {name for parts in ranks for name in parts} == set(stored)
    for name, tensor in stored.items():
        for num_rows in (1, len(tensor) // 2 + 1, len(tensor) + 1):
            assert torch.equal(read(ranks, name, num_rows), tensor[:num_rows]), name


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("config", [BLOCKS, CHANNELS], ids=["blocks", "channels"])
def test_a_quantized_checkpoint_has_values_and_scales(tmp_path: Path, config: dict[str, Any], tp: int) -> None:
    folder = quantize_checkpoint(make_checkpoint(tmp_path / "dense", "llama", **SIZES), tmp_path / "fp8", config)
    ranks, stored = load_ranks(folder, tp), load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        assert torch.equal(read(ranks, name, 5), tensor[:5].float()), name


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_what_is_quantized_at_the_start_has_the_values_that_it_stands_for(
    tmp_path: Path, family: str, quantization: str
) -> None:
    folder = make_checkpoint(tmp_path, family, **SIZES | {"moe_intermediate_size": 256})
    ranks, stored = load_ranks(folder, 2, quantize=quantization), load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        is_exact = next(parts[name] for parts in ranks if name in parts).target.dtype != FP8
        bounds = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1 / 16, "atol": 1e-5}
        torch.testing.assert_close(read(ranks, name, 300), tensor[:300], **bounds)
    assert any(part.target.dtype == FP8 for part in ranks[0].values())
    whole = load_ranks(folder, quantize=quantization)
    assert add_parts([*sum_parts(whole[0])]) == add_parts([each for parts in ranks for each in sum_parts(parts)])


def test_what_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_VALUES", 100)
    (parts,) = load_ranks(make_checkpoint(tmp_path, "llama"))
    name = "model.embed_tokens.weight"
    assert len(read([parts], name, 2)) == 2
    with pytest.raises(UpdateError, match=r"weight has shape \[261, 48\]: 100 values, or 2 rows, can be read"):
        [*read_rows(name, parts[name], 3)]
