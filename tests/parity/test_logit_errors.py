"""The references of ``scripts/measure_logit_errors.py`` compute what models do, without the errors of kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cases.models import make_checkpoint
from tests.cases.quantized import SIZES
from tests.scripts import load_script
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.model.decoder import Decoder
from toka_async.model.matrices.fp8 import Fp8Matrix
from toka_async.model.matrices.ops import Ops, TorchOps
from toka_async.model.weights import build_decoder, random_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


errors = load_script("measure_logit_errors")


def build(folder: Path, quantize: str, ops: Ops) -> Decoder:
    decoder = build_decoder(read_spec(folder, quantize), torch.float32, DEVICE, ops=ops)
    random_weights(decoder, 0)
    return decoder


def compute(decoder: Decoder, folder: Path, quantize: str, stored: str) -> Tensor:
    """Logits of two rows: prompts of 12 tokens in two chunks, and two decoded tokens each."""
    spec, limits = read_spec(folder, quantize), RankLimits(max_seqs=4, max_tokens=64, max_context=64)
    choice = errors.AttentionChoice("reference", stored, 4, limits)
    logits = errors.compute_logits(decoder, spec, torch.float32, choice, errors.make_text(261, 2, 12, 2, 2))
    assert isinstance(logits, Tensor)
    return logits


def measure_error(decoder: Decoder, plain: object, folder: Path, quantize: str, stored: str, logits: Tensor) -> float:
    """That of the logits from a reference's, which has the decoder's weights."""
    reference = errors.build_reference(read_spec(folder, quantize), errors.take_state(decoder), plain, DEVICE)
    return float(errors.compare(logits, compute(reference, folder, quantize, stored)).rms)


def test_differences_are_in_standard_deviations() -> None:
    others = torch.tensor([[[0.0, 2.0], [4.0, 2.0]]])
    deviation = others.std(correction=0)
    found = errors.compare(others + torch.tensor([[[3.0, 0.0], [0.0, 0.0]]]), others)
    assert found.rms == pytest.approx(float(1.5 / deviation))
    assert found.largest == pytest.approx(float(3 / deviation))
    assert found.same == 0.5
    first, second = torch.tensor([0.0, 2.0]).log_softmax(-1), torch.tensor([3.0, 2.0]).log_softmax(-1)
    assert found.divergence == pytest.approx(float((first.exp() * (first - second)).sum() / 2), rel=1e-6)


@pytest.mark.parametrize("quantize", ["none", "fp8", "fp8_block"])
@pytest.mark.parametrize("stored", ["auto", "fp8"])
def test_without_kernels_inputs_are_left_as_they_are(tmp_path: Path, quantize: str, stored: str) -> None:
    folder, ops = make_checkpoint(tmp_path, "qwen3_moe", **SIZES, **EXPERTS), TorchOps()
    decoder, plain = build(folder, quantize, ops), errors.watch_inputs(ops)
    logits = compute(decoder, folder, quantize, stored)
    assert measure_error(decoder, plain, folder, quantize, stored, logits) < 1e-3
    if quantize != "none":
        assert measure_error(decoder, errors.PlainInputs(), folder, quantize, stored, logits) > 1e-2


@pytest.mark.parametrize("quantize", ["fp8", "fp8_block"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_references_quantize_inputs_where_kernels_do(tmp_path: Path, family: str, quantize: str) -> None:
    """Of 12 rows all are quantized; of two kernels take them as they are."""
    pytest.importorskip("triton")
    from toka_async.kernels.experts.mixture import ExpertKernels
    from toka_async.kernels.few_rows import ADD, STORE, FewRowsProducts, FewRowsTile
    from toka_async.kernels.fp8.ops import ScaledKernels
    from toka_async.kernels.fp8.products import ScaledProducts
    from toka_async.kernels.fused import FusedOps

    folder = make_checkpoint(tmp_path, family, **SIZES, num_hidden_layers=1, **EXPERTS)
    few, experts = FewRowsProducts(1 << 20, 100), ExpertKernels()
    ops = FusedOps(scaled=ScaledKernels(ScaledProducts(), few_rows=few), experts=experts)
    decoder = build(folder, quantize, ops)
    for matrix in (each for each in decoder.modules() if isinstance(each, Fp8Matrix)):
        for finish in (STORE, ADD, "silu"):
            few.use(matrix.scaled, finish, [2, 64], [FewRowsTile(16, 16, 128, 1, 2), None])
    plain = errors.watch_inputs(ops)
    logits = compute(decoder, folder, quantize, "auto")
    assert {rows for _, rows, *_ in plain.seen} == {2}
    assert ("experts" in {finish for finish, *_ in plain.seen}) == (family == "qwen3_moe")
    prompts, decoded = logits[:, :12], logits[:, 12:]
    for inputs, exact in ((plain, logits), (errors.PlainInputs(), prompts)):
        reference = errors.build_reference(read_spec(folder, quantize), errors.take_state(decoder), inputs, DEVICE)
        others = compute(reference, folder, quantize, "auto")
        assert errors.compare(exact, others[:, : exact.shape[1]]).rms < 2e-3
    assert errors.compare(decoded, others[:, 12:]).rms > 1e-2


def test_other_weights_are_no_quantized_ones(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", **SIZES)
    exact, rounded = (errors.sample_weights(build(folder, quantize, TorchOps())) for quantize in ("none", "fp8"))
    assert 0.01 < errors.check_weights(rounded, exact) < 0.05
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ModelError, match=f"{name} differs by 1"):
        errors.check_weights(rounded | {name: torch.randn_like(exact[name]) * exact[name].std()}, exact)


def test_layers_are_left_out(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "whole", "llama", **SIZES)
    cut = errors.cut_layers(errors.cut_layers(folder, 1, tmp_path / "cut"), 1, tmp_path / "again")
    assert read_spec(folder).num_layers == 2
    assert read_spec(cut).num_layers == 1
    assert (cut / "model.safetensors").exists()
