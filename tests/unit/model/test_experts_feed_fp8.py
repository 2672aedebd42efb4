"""Experts with weights of 8-bit floats, as checkpoints have them or made as they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.models import make_checkpoint
from tests.cases.quantized import BLOCKS, CHANNELS, SIZES, TENSORS, dequantize_checkpoint, quantize_checkpoint
from tests.drivers.thread_ranks import run_ranks
from tests.fakes.mean_attention import run
from toka_async.checkpoint.division import check_tensor_size, group_experts
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.decoder import Decoder
from toka_async.model.experts_feed import ExpertsFeed
from toka_async.model.weights import build_decoder, load_weights, random_weights

CPU = torch.device("cpu")
PUBLISHED = {"blocks": BLOCKS, "channels": CHANNELS, "tensors": TENSORS}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {},
}


def load(folder: Path, comm: Comm, quantize: str = "none", ep: int = 1) -> Decoder:
    decoder = build_decoder(group_experts(read_spec(folder, quantize), ep), torch.float64, CPU, comm)
    load_weights(decoder, folder)
    return decoder


def logits(decoder: Decoder) -> Tensor:
    return run(decoder, decoder.num_heads // 2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_checkpoints_equal_what_they_stand_for(tmp_path: Path, family: str, kind: str) -> None:
    dense = make_checkpoint(tmp_path / "dense", family, **SIZES | FAMILIES[family])
    folder = quantize_checkpoint(dense, tmp_path / "quantized", PUBLISHED[kind])
    decoder = load(folder, LocalComm())
    feeds = [layer.feed for layer in decoder.list_layers() if isinstance(layer.feed, ExpertsFeed)]
    assert {feed.weights.gate_up.dtype for feed in feeds} == {torch.float8_e4m3fn}
    expected = logits(load(dequantize_checkpoint(folder, tmp_path / "exact"), LocalComm()))
    torch.testing.assert_close(logits(decoder), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("kind", "quantize"), [("blocks", "fp8_block"), ("channels", "fp8")])
def test_weights_are_quantized_as_they_are_loaded(tmp_path: Path, kind: str, quantize: str) -> None:
    dense = make_checkpoint(tmp_path / "dense", "qwen3_moe", **SIZES | FAMILIES["qwen3_moe"])
    folder = quantize_checkpoint(dense, tmp_path / "quantized", PUBLISHED[kind])
    assert torch.equal(logits(load(dense, LocalComm(), quantize)), logits(load(folder, LocalComm())))


@pytest.mark.parametrize("source", ["blocks", "channels", "tensors", "fp8_block", "fp8"])
@pytest.mark.parametrize("ep", [1, 2])
def test_ranks_together_equal_one(tmp_path: Path, source: str, ep: int) -> None:
    folder, how = make_checkpoint(tmp_path / "dense", "qwen3_moe", **SIZES | FAMILIES["qwen3_moe"]), source
    if source in PUBLISHED:
        folder, how = quantize_checkpoint(folder, tmp_path / "quantized", PUBLISHED[source]), "none"
    alone = logits(load(folder, LocalComm(), how))
    for of_rank in run_ranks(2, lambda comm: logits(load(folder, comm, how, ep))):
        torch.testing.assert_close(of_rank, alone, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("quantize", ["fp8", "fp8_block"])
def test_random_weights(tmp_path: Path, quantize: str) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", **SIZES | FAMILIES["qwen3_moe"])
    decoder = build_decoder(read_spec(folder, quantize), torch.bfloat16, CPU)
    random_weights(decoder, seed=0)
    for layer in decoder.list_layers():
        assert isinstance(layer.feed, ExpertsFeed)
        weights = layer.feed.weights
        assert weights.down_scales is not None
        assert bool((weights.down_scales > 0).all())
        assert weights.down.float().std() > 10


def test_experts_that_have_no_whole_blocks(tmp_path: Path) -> None:
    fields = SIZES | FAMILIES["qwen3_moe"] | {"moe_intermediate_size": 192}
    dense = make_checkpoint(tmp_path / "dense", "qwen3_moe", **fields)
    with pytest.raises(ModelError, match=r"mlp\.experts\.0\.gate_proj.* no multiple of 128"):
        check_tensor_size(read_spec(dense, "fp8_block"), 1)
