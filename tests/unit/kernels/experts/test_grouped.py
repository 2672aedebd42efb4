from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.experts import draw
from toka_async.kernels.experts.grouped import STORE, GroupedProducts, GroupedTile, GroupScales
from toka_async.model.matrices.ops import TorchOps

TILE = GroupedTile(rows=16, width=32, depth=16, num_stages=2, num_warps=4)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def multiply_plainly(x: Tensor, weight: Tensor, ends: list[int], finish: str) -> Tensor:
    parts = []
    for (begin, end), matrix in zip(pairwise([0, *ends]), weight, strict=True):
        product = x[begin:end].float() @ matrix.float().T
        parts.append(product if finish == STORE else TorchOps().gate(product, finish))
    return torch.cat(parts)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("finish", [STORE, "silu"])
@pytest.mark.parametrize(
    ("ends", "n", "k"), [([1], 32, 16), ([0, 0, 5, 5, 40, 41], 48, 40), ([20, 20, 52], 24, 24), ([0, 3, 3], 40, 64)]
)
def test_each_expert_multiplies_its_rows(
    device: torch.device, ends: list[int], n: int, k: int, finish: str, dtype: torch.dtype, copies: bool
) -> None:
    """Experts without rows, with parts of a tile and with several; widths and depths that are no whole tiles."""
    x, weight = draw(ends[-1], k, dtype=dtype, device=device), draw(len(ends), n, k, dtype=dtype, device=device)
    weight /= k**0.5
    output = torch.full((ends[-1] + 3, n if finish == STORE else n // 2), 7.0, dtype=dtype, device=device)
    products, last = GroupedProducts(copies), torch.tensor(ends, dtype=torch.int32, device=device)
    products.multiply(x, weight, last, output, finish, TILE)
    exact = multiply_plainly(x, weight, ends, finish)
    torch.testing.assert_close(output[: ends[-1]].float(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert bool((output[ends[-1] :] == 7).all())  # no expert's rows


def quantize(numbers: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """E4M3 values of [n, k], scales [n / rows, k / columns], and what both stand for."""
    n, k = numbers.shape
    tiles = numbers.float().view(n // rows, rows, k // columns, columns)
    scales = tiles.abs().amax((1, 3)) / 448
    values = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.view(n, k), scales, (values.float() * scales[:, None, :, None]).view(n, k)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("finish", [STORE, "silu"])
@pytest.mark.parametrize("by_block", [False, True])
def test_values_of_8_bits_have_scales(device: torch.device, by_block: bool, finish: str, copies: bool) -> None:
    """Tokens' and rows', or groups' and blocks', whose gate and up matrices differ."""
    k, ends, tile = 256, [3, 3, 20], GroupedTile(16, 64, 128, num_stages=2, num_warps=4)
    tokens = draw(9, k, dtype=torch.float32, device=device) * torch.linspace(1, 9, 9, device=device)[:, None]
    weight = draw(3, 256, k, dtype=torch.float32, device=device) / k**0.5
    weight[:, 128:] *= 3
    x, x_scales, exact_x = quantize(tokens, 1, 128 if by_block else k)
    parts = [quantize(each, 128 if by_block else 1, 128 if by_block else k) for each in weight]
    values, scales, exact = (torch.stack(each) for each in zip(*parts, strict=True))
    sources = torch.arange(20, dtype=torch.int32, device=device) * 7 % 18
    output = torch.empty(20, 256 if finish == STORE else 128, dtype=torch.bfloat16, device=device)
    of_group = GroupScales(x_scales.T.contiguous().T, scales if by_block else scales[:, :, 0].contiguous())
    last = torch.tensor(ends, dtype=torch.int32, device=device)
    GroupedProducts(copies).multiply(x, values, last, output, finish, tile, sources, 2, of_group)
    expected = multiply_plainly(exact_x[sources.long() // 2], exact, ends, finish)
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("copies", [False, True])
def test_rows_are_gathered(device: torch.device, copies: bool) -> None:
    x, weight = draw(6, 32, dtype=torch.float16, device=device), draw(3, 64, 32, dtype=torch.float16, device=device)
    sources = torch.tensor([11, 0, 3, 17, 2, 2, 8], dtype=torch.int32, device=device)
    ends, output = [2, 2, 7], x.new_empty(7, 32)
    last = torch.tensor(ends, dtype=torch.int32, device=device)
    GroupedProducts(copies).multiply(x, weight, last, output, "silu", TILE, sources, 3)
    exact = multiply_plainly(x[sources.long() // 3], weight, ends, "silu")
    torch.testing.assert_close(output.float(), exact, atol=0.05, rtol=4e-3)


def test_programs_compute_several_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(90, 16, dtype=torch.float16, device=device), draw(2, 64, 16, dtype=torch.float16, device=device)
    products, output = GroupedProducts(copies=False), x.new_empty(90, 64)
    monkeypatch.setattr(products, "_resident", {(TILE, STORE, weight.shape, weight.dtype): 3})
    products.multiply(x, weight, torch.tensor([33, 90], dtype=torch.int32, device=device), output, STORE, TILE)
    torch.testing.assert_close(output.float(), multiply_plainly(x, weight, [33, 90], STORE), atol=0.02, rtol=2e-3)


def test_a_rows_product_depends_on_no_other_row(device: torch.device) -> None:
    x, weight = draw(50, 48, dtype=torch.bfloat16, device=device), draw(2, 32, 48, dtype=torch.bfloat16, device=device)
    products = GroupedProducts(copies=False)

    def multiply(rows: Tensor, ends: list[int]) -> Tensor:
        output = x.new_empty(len(rows), 32)
        products.multiply(rows, weight, torch.tensor(ends, dtype=torch.int32, device=device), output, STORE, TILE)
        return output

    together = multiply(x, [20, 50])
    assert torch.equal(multiply(x[19:20], [1, 1])[0], together[19])
    assert torch.equal(multiply(x[45:], [0, 5]), together[45:])
