from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from toka_async.checkpoint.spec import ACTIVATIONS
from toka_async.kernels.fp8.quantize import quantize
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import GatedProducts, RowScales, Tile, _gated_product
from toka_async.kernels.scaled_weight import ScaledWeight
from toka_async.model.matrices import scaling as fp8
from toka_async.model.matrices.ops import TorchOps

SMALL = Tile(rows=16, columns=16, depth=16, num_stages=2, num_warps=4)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def normal(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def chosen(weight: Tensor, activation: str = "silu", most: int = 80, fewest: int = 1) -> GatedProducts:
    """Our kernel, for up to `most` rows."""
    gates = GatedProducts(3, fewest)
    gates.use(weight, activation, [most], [SMALL])
    return gates


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "inner", "hidden"), [(1, 16, 16), (16, 32, 48), (37, 56, 40), (80, 24, 64), (300, 24, 16)]
)
def test_it_equals_the_product_and_its_gate(
    device: torch.device, num_rows: int, inner: int, hidden: int, dtype: torch.dtype, activation: str
) -> None:
    """Whole tiles and parts of them; fewer programs than tiles, and more; groups of rows, the last one in part."""
    x, weight = normal(device, dtype, num_rows, hidden), normal(device, dtype, 2 * inner, hidden) / hidden**0.5
    output = chosen(weight, activation, 300).compute(x, weight, activation)
    assert output is not None
    assert output.dtype == dtype
    exact = TorchOps().gated_linear(x.float(), weight.float(), None, activation)
    torch.testing.assert_close(output.float(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_only_what_it_was_chosen_for_is_computed() -> None:
    weight = normal(torch.device("cpu"), torch.float16, 32, 16)
    gates = chosen(weight)
    assert gates.ranges() == [(1, 80)]
    x = normal(weight.device, weight.dtype, 90, 16)
    assert gates.compute(x[:80], weight, "silu") is not None
    assert gates.compute(x, weight, "silu") is None  # too many rows
    assert gates.compute(x[:0], weight, "silu") is None
    assert gates.compute(x[:3], weight, "gelu") is None
    assert gates.compute(x[:3], weight[:16], "silu") is None
    assert gates.compute(x.view(-1)[1 : 1 + 48].view(3, 16), weight, "silu") is None  # at an odd address
    assert gates.compute(x.T.contiguous().T[:16], weight, "silu") is None  # not contiguous


def test_fused_ops_use_it_without_a_bias(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, ran, run = normal(device, torch.float16, 32, 16), list[int](), GatedProducts.run

    def counted(gates: GatedProducts, activation: str, tile: Tile, *operands: Tensor, scales: None) -> None:
        ran.append(len(operands[0]))
        run(gates, activation, tile, *operands, scales=scales)

    x, bias = normal(device, torch.float16, 3, 16), normal(device, torch.float16, 32)
    ops = FusedOps(gates=chosen(weight))
    monkeypatch.setattr(GatedProducts, "run", counted)
    for each in (None, bias):
        exact = TorchOps().gated_linear(x.float(), weight.float(), None if each is None else each.float(), "silu")
        torch.testing.assert_close(ops.gated_linear(x, weight, each, "silu").float(), exact, atol=4e-2, rtol=4e-3)
        assert ran == [3]


def test_one_kernel_for_any_number_of_rows() -> None:
    """Triton would build one for 1, one for multiples of 16, and one for the others."""
    if torch.cuda.is_available():
        excluded = [param.name for param in _gated_product.kernel.params if param.do_not_specialize]
    else:  # the interpreter's
        excluded = _gated_product.kwargs["do_not_specialize"]
    assert excluded == ["num_rows", "token_stride", "group_stride"]


def test_few_rows_are_computed_separately() -> None:
    weight = normal(torch.device("cpu"), torch.float16, 32, 16)
    gates = chosen(weight, fewest=3)
    assert gates.compute(normal(weight.device, weight.dtype, 2, 16), weight, "silu") is None
    assert gates.compute(normal(weight.device, weight.dtype, 3, 16), weight, "silu") is not None


def test_by_default_from_64_rows_on() -> None:
    weight = normal(torch.device("cpu"), torch.float16, 32, 16)
    gates = chosen(weight, fewest=GatedProducts(3).fewest)
    x = normal(weight.device, weight.dtype, 64, 16)
    assert gates.ranges() == [(64, 80)]
    assert gates.compute(x[:63], weight, "silu") is None
    assert gates.compute(x, weight, "silu") is not None
    assert chosen(weight, most=63, fewest=64).ranges() == []


def test_ranges_are_of_rows() -> None:
    gates, weight = GatedProducts(3, fewest=2), normal(torch.device("cpu"), torch.float16, 32, 16)
    gates.use(weight, "silu", [4, 20, 40, 41, 200], [SMALL, None, SMALL, SMALL, None])
    assert gates.ranges() == [(2, 4), (21, 41)]


@pytest.mark.parametrize(("by_block", "num_rows"), [(False, 1), (False, 37), (True, 5), (True, 37)])
def test_weights_of_8_bits(device: torch.device, num_rows: int, by_block: bool) -> None:
    inner, hidden = 128, 256
    x, numbers = normal(device, torch.bfloat16, num_rows, hidden), normal(device, torch.bfloat16, 2 * inner, hidden)
    tile = (128, 128) if by_block else (1, hidden)
    values, weight_scales = fp8.quantize(numbers / 16, *tile)
    exact_weight = fp8.dequantize(values, weight_scales, *tile)
    weight = ScaledWeight(values, weight_scales if by_block else weight_scales[:, 0].contiguous())
    rows, scales = quantize(x, by_block)
    gates = GatedProducts(3, 1)
    gates.use(weight, "silu", [80], [Tile(rows=16, columns=32, depth=128, num_stages=2, num_warps=4)])
    output = gates.compute(rows, weight, "silu", RowScales(scales, torch.bfloat16))
    assert output is not None
    assert output.dtype == torch.bfloat16
    exact = TorchOps().gated_linear(fp8.dequantize(rows, scales, 1, tile[1]), exact_weight, None, "silu")
    torch.testing.assert_close(output.float(), exact, atol=1e-2, rtol=1e-2)


def test_columns_of_8_bits_beyond_the_last_one(device: torch.device) -> None:
    x, numbers = normal(device, torch.bfloat16, 20, 128), normal(device, torch.bfloat16, 96, 128)
    values, weight_scales = fp8.quantize(numbers, 1, 128)
    rows, scales = quantize(x, False)
    weight, output = ScaledWeight(values, weight_scales[:, 0].contiguous()), x.new_empty(20, 48)
    tile = Tile(rows=16, columns=32, depth=128, num_stages=2, num_warps=4)
    GatedProducts(3).run("silu", tile, rows, weight, output, scales=RowScales(scales, x.dtype))
    wide = fp8.dequantize(rows, scales, 1, 128), fp8.dequantize(values, weight_scales, 1, 128)
    torch.testing.assert_close(output.float(), TorchOps().gated_linear(*wide, None, "silu"), atol=1e-1, rtol=1e-2)
