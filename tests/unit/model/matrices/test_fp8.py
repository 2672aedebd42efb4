from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cases.models import make_checkpoint
from tests.cases.quantized import BLOCKS, CHANNELS, SIZES, TENSORS, dequantize_checkpoint, quantize_checkpoint
from tests.drivers.thread_ranks import run_ranks
from tests.fakes.mean_attention import in_shards, run
from toka_async.checkpoint.division import StagePart
from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.checkpoint.quantization import FORMATS
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.model.activation_layout import LayoutPolicy
from toka_async.model.attention import Attention
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.decoder import Decoder
from toka_async.model.matrices.blocked_ops import BlockedOps
from toka_async.model.matrices.dense import DenseMatrix
from toka_async.model.matrices.fp8 import Fp8Matrix
from toka_async.model.matrices.matrix import Rows
from toka_async.model.matrices.ops import Ops, TorchOps
from toka_async.model.matrices.scaling import quantize
from toka_async.model.matrices.share import whole_of
from toka_async.model.weights import build_decoder, load_weights, random_weights

CPU, OPS = torch.device("cpu"), TorchOps()
PUBLISHED = {"blocks": BLOCKS, "channels": CHANNELS, "tensors": TENSORS}


def load(folder: Path, comm: Comm, quantize: str = "none", layouts: LayoutPolicy | None = None) -> Decoder:
    decoder = build_decoder(read_spec(folder, quantize), torch.float64, CPU, comm, layouts=layouts)
    load_weights(decoder, folder)
    return decoder


def logits(decoder: Decoder) -> Tensor:
    return run(decoder, decoder_kv_heads(decoder))


def decoder_kv_heads(decoder: Decoder) -> int:
    return 2 * decoder.num_heads // 4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16], ids=str)
def test_published_checkpoints_equal_what_they_stand_for(
    tmp_path: Path, family: str, kind: str, scales: torch.dtype
) -> None:
    dense = make_checkpoint(tmp_path / "dense", family, **SIZES, mlp_bias=family == "llama")
    folder = quantize_checkpoint(dense, tmp_path / "quantized", PUBLISHED[kind], scales)
    decoder = load(folder, LocalComm())
    matrices = [module for module in decoder.modules() if isinstance(module, Fp8Matrix)]
    assert len(matrices) == 2 * 4
    expected = logits(load(dequantize_checkpoint(folder, tmp_path / "exact"), LocalComm()))
    assert torch.equal(logits(decoder), expected)


@pytest.mark.parametrize(("kind", "quantize"), [("blocks", "fp8_block"), ("channels", "fp8")])
def test_weights_are_quantized_as_they_are_loaded(tmp_path: Path, kind: str, quantize: str) -> None:
    dense = make_checkpoint(tmp_path / "dense", "qwen3", **SIZES)
    folder = quantize_checkpoint(dense, tmp_path / "quantized", PUBLISHED[kind])
    assert torch.equal(logits(load(dense, LocalComm(), quantize)), logits(load(folder, LocalComm())))


@pytest.mark.parametrize("source", ["blocks", "channels", "tensors", "fp8_block", "fp8"])
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_together_equal_one(tmp_path: Path, source: str, sharded: bool) -> None:
    folder, how = make_checkpoint(tmp_path / "dense", "llama", **SIZES), source
    if source in PUBLISHED:
        folder, how = quantize_checkpoint(folder, tmp_path / "quantized", PUBLISHED[source]), "none"
    alone = logits(load(folder, LocalComm(), how))
    for of_rank in run_ranks(2, lambda comm: logits(load(folder, comm, how, in_shards(comm) if sharded else None))):
        torch.testing.assert_close(of_rank, alone, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("quantize", ["fp8", "fp8_block"])
def test_stages_hold_their_layers(tmp_path: Path, quantize: str) -> None:
    folder = make_checkpoint(tmp_path, "llama", **SIZES)
    whole = dict(load(folder, LocalComm(), quantize).parts())
    decoder = build_decoder(read_spec(folder, quantize), torch.float64, CPU, part=StagePart(1, 2, 2))
    load_weights(decoder, folder)
    for name, part in decoder.parts():
        assert torch.equal(part.target.view(torch.uint8), whole[name].target.view(torch.uint8)), name


@pytest.mark.parametrize("kind", PUBLISHED)
def test_exempt_matrices_stay_dense(tmp_path: Path, kind: str) -> None:
    names = "ignore" if kind == "channels" else "modules_to_not_convert"
    exempt = [
        "lm_head",
        "model.layers.1.self_attn.o_proj",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
    ]
    dense = make_checkpoint(tmp_path / "dense", "llama", **SIZES)
    folder = quantize_checkpoint(dense, tmp_path / "quantized", PUBLISHED[kind] | {names: exempt})
    decoder = load(folder, LocalComm())
    first, second = decoder.list_layers()
    assert isinstance(first.mixer.output, Fp8Matrix)
    assert isinstance(second.mixer.output, DenseMatrix)
    assert isinstance(second.mixer, Attention)
    assert isinstance(second.mixer.qkv, Fp8Matrix)
    expected = logits(load(dequantize_checkpoint(folder, tmp_path / "exact"), LocalComm()))
    assert torch.equal(logits(decoder), expected)
    text = (folder / "config.json").read_text().replace("0.mlp.up_proj", "0.mlp.other")
    (folder / "config.json").write_text(text)
    with pytest.raises(
        ModelError, match=r"layers.0: mlp.gate_proj is not quantized, but others of mlp.gate_proj, mlp.up"
    ):
        read_spec(folder)


def test_a_checkpoint_cannot_be_quantized_twice(tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama", **SIZES)
    folder = quantize_checkpoint(dense, tmp_path / "quantized", BLOCKS)
    with pytest.raises(ModelError, match=r"weights are quantized; leave out model\.quantize=fp8"):
        read_spec(folder, "fp8")


@pytest.mark.parametrize("kind", PUBLISHED)
def test_wrong_tensors(tmp_path: Path, kind: str) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama", **SIZES)
    folder = quantize_checkpoint(dense, tmp_path / "quantized", PUBLISHED[kind])
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    weight = "model.layers.0.mlp.up_proj.weight"
    scale = f"{weight}_scale" if kind == "channels" else f"{weight}_scale_inv"
    for name, value, error in (
        (weight, stored[weight].float(), "is of type F32; supported: F8_E4M3"),
        (scale, torch.ones(3, 5), "has shape"),
    ):
        save_file(stored | {name: value}, folder / "model.safetensors")
        with pytest.raises(ModelError, match=error):
            load(folder, LocalComm())
    save_file({name: value for name, value in stored.items() if name != scale}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="is missing from the weights"):
        load(folder, LocalComm())
    del fields["quantization_config"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="F8_E4M3"):
        load(folder, LocalComm())


@pytest.mark.parametrize("source", ["blocks", "channels", "fp8_block", "fp8"])
def test_random_weights_are_those_of_any_division(tmp_path: Path, source: str) -> None:
    folder, how = make_checkpoint(tmp_path / "dense", "llama", **SIZES), source
    if source in PUBLISHED:
        folder, how = quantize_checkpoint(folder, tmp_path / "quantized", PUBLISHED[source]), "none"

    def drawn(comm: Comm) -> Tensor:
        decoder = build_decoder(read_spec(folder, how), torch.float64, CPU, comm)
        random_weights(decoder, 5)
        return logits(decoder)

    alone = drawn(LocalComm())
    assert alone.isfinite().all()
    assert alone.std() > 0
    for of_rank in run_ranks(2, drawn):
        torch.testing.assert_close(of_rank, alone, atol=1e-9, rtol=1e-9)


def make(kind: str, n: int, k: int, ops: Ops = OPS, bias: bool = False) -> Fp8Matrix:
    spec = MatrixSpec(names=("it",), outputs=(Units(n),), inputs=Units(k), split="inputs", bias=bias, format=kind)
    matrix = Fp8Matrix(spec, [whole_of(n)], whole_of(k), ops)
    for name, part in matrix.parts():
        numbers = torch.randn(part.shape, generator=torch.Generator().manual_seed(len(name)))
        part.write(numbers / k**0.5)
    return matrix


def test_products_on_a_cpu() -> None:
    matrix, consumer = make("fp8/channel", 256, 128, bias=True), make("fp8/block", 128, 128)
    x, residual = torch.randn(5, 128), torch.randn(5, 256)
    assert matrix.bias is not None
    expected = x @ matrix.dequantize().T + matrix.bias
    rows = matrix.take(x)
    torch.testing.assert_close(matrix.product(rows), expected)
    torch.testing.assert_close(matrix.product(rows, with_bias=False), expected - matrix.bias)
    torch.testing.assert_close(matrix.gated(rows, "silu", consumer).values, OPS.gate(expected, "silu"))
    torch.testing.assert_close(consumer.gate(expected, "silu").values, OPS.gate(expected, "silu"))
    product, same = matrix.add(residual, rows)
    assert same is residual
    torch.testing.assert_close(product, expected)
    norm = torch.ones(128), 1e-5
    torch.testing.assert_close(matrix.norm(x, x, norm)[0].values, matrix.norm(2 * x, None, norm)[0].values)
    assert matrix.plain is None
    assert matrix.shape == (256, 128)


def test_rows_keep_their_bits_in_every_batch() -> None:
    matrix, x = make("fp8/block", 128, 256, BlockedOps()), torch.randn(40, 256)
    whole = matrix.product(matrix.take(x))
    assert torch.equal(matrix.product(matrix.take(x[7:8])), whole[7:8])


class TestKernels:
    """With the kernels of a GPU, in Triton's interpreter where there is none."""

    @pytest.fixture(autouse=True)
    def has_triton(self) -> None:
        pytest.importorskip("triton")

    @staticmethod
    def make_ops(most_few: int = 0) -> Any:
        from toka_async.kernels.fp8.ops import ScaledKernels
        from toka_async.kernels.fp8.products import ScaledProducts
        from toka_async.kernels.fused import FusedOps

        ops = FusedOps(scaled=ScaledKernels(ScaledProducts()))
        assert ops.scaled is not None
        ops.scaled.most_few = most_few
        return ops

    @pytest.mark.parametrize("kind", ["fp8/channel", "fp8/block"])
    @pytest.mark.parametrize("most_few", [0, 16])
    @pytest.mark.parametrize("bias", [False, True])
    def test_products_are_near_those_of_plain_rows(self, kind: str, most_few: int, bias: bool) -> None:
        ops = self.make_ops(most_few)
        matrix, consumer = make(kind, 256, 128, ops, bias), make(kind, 128, 128, ops, bias)
        exact, exact_consumer = make(kind, 256, 128, OPS, bias), make(kind, 128, 128, OPS, bias)
        x, residual, weight = torch.randn(5, 128), torch.randn(5, 128), torch.randn(128)
        rows, total = matrix.norm(x, residual, (weight, 1e-5))
        assert (rows.scales is None) == (most_few > 0)
        wanted, wanted_total = exact.norm(x, residual, (weight, 1e-5))
        torch.testing.assert_close(total, wanted_total)
        self.check(matrix.product(rows), exact.product(wanted))
        left = Rows(total, norm=(weight, 1e-5))
        self.check(matrix.product(left), exact.product(wanted))
        gated, wanted_gated = matrix.gated(left, "silu", consumer), exact.gated(wanted, "silu", exact_consumer)
        self.check(consumer.product(gated), exact_consumer.product(wanted_gated))
        before = total.clone()
        added, after = consumer.add(total, gated)
        assert (added is None) == (not bias)
        self.check(after if added is None else added + after, before + exact_consumer.product(wanted_gated))

    @staticmethod
    def check(actual: Tensor, exact: Tensor) -> None:
        """Of numbers with three bits of mantissa, a sum of products keeps about five."""
        error = (actual - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert 1e-4 < error < 0.06

    @pytest.mark.parametrize("kind", ["fp8/channel", "fp8/block"])
    def test_rows_keep_their_bits_in_every_batch(self, kind: str) -> None:
        from toka_async.kernels.invariant.products import InvariantOps

        matrix, x, norm = make(kind, 128, 256, InvariantOps()), torch.randn(20, 256), (torch.randn(256), 1e-5)
        whole = matrix.product(matrix.norm(x, x, norm)[0])
        assert torch.equal(matrix.product(matrix.norm(x[7:8], x[7:8], norm)[0]), whole[7:8])

    def test_gathered_rows_can_be_multiplied(self) -> None:
        ops = self.make_ops()
        matrix, x = make("fp8/block", 128, 256, ops), torch.randn(6, 256)
        rows, _ = matrix.norm(x, None, (torch.ones(256), 1e-5))
        assert rows.scales is not None
        gathered = Rows(rows.values.clone(), rows.scales.contiguous())
        assert torch.equal(matrix.product(gathered), matrix.product(rows))


def test_formats_are_those_of_checkpoints() -> None:
    values, scales = quantize(torch.randn(128, 256), 128, 128)
    matrix = make("fp8/block/weight_scale_inv", 128, 256)
    parts = dict(matrix.parts())
    assert set(parts) == {"it.weight", "it.weight_scale_inv"}
    parts["it.weight"].write(values)
    parts["it.weight_scale_inv"].write(scales)
    assert matrix.scales.shape == (1, 4)  # filled up, as cuBLASLt reads it
    assert torch.equal(matrix.scales[:, :2], scales)
    assert set(FORMATS) == {
        "fp8/channel",
        "fp8/block",
        "fp8/channel/weight_scale",
        "fp8/block/weight_scale",
        "fp8/block/weight_scale_inv",
        "fp8/tensor/weight_scale",
    }
