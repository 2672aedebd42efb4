from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from toka_async.kernels.few_rows import ADD, FINISHES, STORE, FewRowsProducts, FewRowsTile
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.scaled_weight import ScaledWeight
from toka_async.model.matrices import scaling as fp8
from toka_async.model.matrices.ops import TorchOps

ONE = FewRowsTile(rows=1, columns=4, depth=16, num_stages=1, num_warps=4)
MANY = FewRowsTile(rows=16, columns=8, depth=16, num_stages=2, num_warps=1)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def normal(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def chosen(weight: Tensor, finish: str = STORE) -> FewRowsProducts:
    """Our kernel, for up to 16 rows."""
    products = FewRowsProducts(1 << 20, 8)
    products.use(weight, finish, [1, 16], [ONE, MANY])
    return products


@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 16, 16), (1, 32, 96), (2, 16, 48), (7, 48, 16), (16, 32, 64)])
def test_it_equals_plain_torch(
    device: torch.device, num_rows: int, n: int, k: int, has_bias: bool, dtype: torch.dtype, finish: str
) -> None:
    x, weight = normal(device, dtype, num_rows, k), normal(device, dtype, n, k) / k**0.5
    bias = normal(device, dtype, n) if has_bias else None
    exact = TorchOps().linear(x.float(), weight.float(), None if bias is None else bias.float())
    output = None
    if finish == ADD:
        output = normal(device, dtype, num_rows, n)
        exact += output.float()
    elif finish != STORE:
        exact = TorchOps().gate(exact, finish)
    actual = chosen(weight, finish).compute(finish, x, weight, bias, output)
    assert actual is not None
    assert output is None or actual is output
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("finish", [STORE, "silu"])
def test_a_norm_can_be_part_of_it(device: torch.device, num_rows: int, finish: str) -> None:
    x, weight = normal(device, torch.bfloat16, num_rows, 48) * 3, normal(device, torch.bfloat16, 32, 48) / 7
    bias, norm = normal(device, torch.bfloat16, 32), (normal(device, torch.bfloat16, 48) + 2, 0.5)
    actual = chosen(weight, finish).compute(finish, x, weight, bias, norm=norm)
    wide = x.float(), weight.float(), bias.float()
    exact = TorchOps().linear(*wide, (norm[0].float(), norm[1]))
    if finish != STORE:
        exact = TorchOps().gate(exact, finish)
    assert actual is not None
    torch.testing.assert_close(actual.float(), exact, atol=3e-2, rtol=3e-2)


def test_float16_may_not_hold_what_is_yet_to_be_normed(device: torch.device) -> None:
    x, weight = normal(device, torch.float16, 1, 32) * 1e4, normal(device, torch.float16, 16, 32)
    norm = torch.full((32,), 9.0, dtype=torch.float16, device=device), 1e-5
    products = chosen(weight)
    assert products.compute(STORE, x, weight, norm=norm) is None
    exact = TorchOps().linear(x.float(), weight.float(), None, (norm[0].float(), 1e-5))
    actual = FusedOps(few_rows=products).linear(x, weight, None, norm)
    torch.testing.assert_close(actual.float(), exact, atol=0.2, rtol=4e-3)


def test_only_what_it_was_chosen_for_is_computed(device: torch.device) -> None:
    weight, x = normal(device, torch.float16, 16, 32), normal(device, torch.float16, 17, 32)
    products = chosen(weight)
    assert products.compute(STORE, x[:16], weight) is not None
    assert products.compute(STORE, x, weight) is None  # too many rows
    assert products.compute(STORE, x[:0], weight) is None
    assert products.compute(ADD, x[:1], weight) is None
    assert products.compute(STORE, x[:1], weight[:8]) is None
    assert products.compute(STORE, x.view(-1)[1:33].view(1, 32), weight) is None  # at an odd address
    assert products.compute(STORE, x.T.contiguous().T[:2], weight) is None  # not contiguous
    products.use(weight, STORE, [1, 16], [None, MANY])
    assert products.compute(STORE, x[:1], weight) is None


def test_what_a_tile_can_compute(device: torch.device) -> None:
    products = FewRowsProducts(0, 1)

    def can_run(num_rows: int, n: int, k: int, tile: FewRowsTile, finish: str = STORE) -> bool:
        x, weight = (torch.zeros(rows, k, dtype=torch.float16, device=device) for rows in (num_rows, n))
        return products.can_run(finish, tile, x, weight)

    assert can_run(1, 12, 16, ONE)
    assert not can_run(2, 12, 16, ONE)
    assert not can_run(1, 14, 16, ONE)
    assert not can_run(1, 12, 24, ONE)
    assert not can_run(1, 12, 16, ONE, "silu")  # six gated columns
    assert can_run(16, 16, 32, MANY, "silu")
    assert not can_run(17, 16, 32, MANY)
    assert not can_run(0, 16, 32, MANY)


@pytest.mark.parametrize("num_rows", [1, 5, 17])
def test_fused_ops_use_it_for_few_rows(device: torch.device, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, ran, run = torch.float16, list[str](), FewRowsProducts.run

    def counted(products: FewRowsProducts, finish: str, *args: Tensor) -> None:
        ran.append(finish)
        run(products, finish, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(FewRowsProducts, "run", counted)
    x, weight = normal(device, dtype, num_rows, 32), normal(device, dtype, 16, 32) / 8
    bias, residual = normal(device, dtype, 16), normal(device, dtype, num_rows, 16)
    products = chosen(weight)
    for finish in (ADD, "silu"):
        products.use(weight, finish, [1, 16], [ONE, MANY])
    ops, wide = FusedOps(few_rows=products), (x.float(), weight.float(), bias.float())
    expected = residual.float() + wide[0] @ wide[1].T
    results = {
        STORE: (ops.linear(x, weight, bias), TorchOps().linear(*wide)),
        "silu": (ops.gated_linear(x, weight, bias, "silu"), TorchOps().gated_linear(*wide, "silu")),
        ADD: (ops.add_linear(residual, x, weight, None)[1], expected),
    }
    for actual, exact in results.values():
        torch.testing.assert_close(actual.float(), exact, atol=4e-3, rtol=4e-3)
    assert ran == (list(results) if num_rows <= 16 else [])


def scaled(device: torch.device, numbers: Tensor, by_block: bool) -> tuple[ScaledWeight, Tensor]:
    """A weight of 8-bit floats, and what it stands for."""
    tile = (128, 128) if by_block else (1, numbers.shape[1])
    values, scales = fp8.quantize(numbers, *tile)
    exact = fp8.dequantize(values, scales, *tile)
    stored = torch.nn.functional.pad(scales, (0, 3)) if by_block else scales[:, 0].contiguous()
    return ScaledWeight(values.to(device), stored.to(device)), exact.to(device)


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("finish", [STORE, ADD, "silu"])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_weights_of_8_bits(device: torch.device, num_rows: int, has_norm: bool, finish: str, by_block: bool) -> None:
    n, k, dtype = 256, 512, torch.bfloat16
    weight, numbers = scaled(device, normal(device, dtype, n, k) / k**0.5, by_block)
    x, bias = normal(device, dtype, num_rows, k), normal(device, dtype, n)
    norm = (normal(device, dtype, k) / 4 + 1, 1e-5) if has_norm else None
    one = FewRowsTile(rows=1, columns=4, depth=256, num_stages=2, num_warps=4)
    many = FewRowsTile(rows=16, columns=16, depth=128, num_stages=2, num_warps=2)
    products = FewRowsProducts(1 << 20, 8)
    products.use(weight, finish, [1, 16], [one, many])
    wide_norm = None if norm is None else (norm[0].float(), norm[1])
    exact = TorchOps().linear(x.float(), numbers, bias.float(), wide_norm)
    output = None
    if finish == ADD:
        output = normal(device, dtype, num_rows, n)
        exact += output.float()
    elif finish != STORE:
        exact = TorchOps().gate(exact, finish)
    actual = products.compute(finish, x, weight, bias, output, norm)
    assert actual is not None
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), exact, atol=4e-2, rtol=2e-2)


def test_tiles_suit_blocks_of_scales(device: torch.device) -> None:
    products, x = FewRowsProducts(1 << 20, 8), normal(device, torch.bfloat16, 1, 512)
    by_channel, by_block = (scaled(device, torch.ones(128, 512), by_block)[0] for by_block in (False, True))
    for rows, depth, fits in ((1, 64, False), (1, 512, True), (16, 64, False), (16, 128, True), (16, 256, False)):
        tile = FewRowsTile(rows, 16, depth, 1, 1)
        assert products.can_run(STORE, tile, x, by_channel)
        assert products.can_run(STORE, tile, x, by_block) == fits
