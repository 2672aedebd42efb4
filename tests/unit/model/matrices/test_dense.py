from __future__ import annotations

import torch
from torch import Tensor

from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.model.matrices.dense import DenseMatrix
from toka_async.model.matrices.matrix import Rows
from toka_async.model.matrices.ops import TorchOps
from toka_async.model.matrices.share import Share, whole_of

OPS = TorchOps()


def make(n: int, k: int, bias: bool = True) -> DenseMatrix:
    spec = MatrixSpec(names=("down",), outputs=(Units(n),), inputs=Units(k), split="inputs", bias=bias)
    matrix = DenseMatrix(spec, [whole_of(n)], whole_of(k), OPS)
    for parameter in matrix.parameters():
        parameter.normal_()
    return matrix


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_products() -> None:
    matrix, consumer, x = make(6, 4), make(2, 3), normal(5, 4)
    assert matrix.bias is not None
    expected = x @ matrix.weight.T + matrix.bias
    rows = matrix.take(x)
    torch.testing.assert_close(matrix.product(rows), expected)
    torch.testing.assert_close(matrix.product(rows, with_bias=False), expected - matrix.bias)
    torch.testing.assert_close(matrix.gated(rows, "silu", consumer).values, OPS.gate(expected, "silu"))
    torch.testing.assert_close(consumer.gate(expected, "silu").values, OPS.gate(expected, "silu"))
    residual = normal(5, 6)
    product, same = matrix.add(residual, rows)
    assert same is residual
    torch.testing.assert_close(product, expected)


def test_a_norm_is_computed_before_or_left_to_the_product() -> None:
    matrix, x, residual, norm = make(6, 4), normal(5, 4), normal(5, 4) + 1, (normal(4), 1e-5)
    rows, total = matrix.norm(x, residual, norm)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(matrix.product(rows), matrix.product(Rows(total, norm=norm)))


def test_its_parts_are_the_checkpoints_matrices_side_by_side() -> None:
    spec = MatrixSpec(names=("q", "k"), outputs=(Units(8), Units(4)), inputs=Units(3), split="outputs", bias=True)
    matrix = DenseMatrix(spec, [Share(8, 4, 4), Share(4, 2, 2)], whole_of(3), OPS)
    parts = dict(matrix.parts())
    assert {name: part.shape for name, part in parts.items()} == {
        "q.weight": (8, 3), "q.bias": (8,), "k.weight": (4, 3), "k.bias": (4,),
    }  # fmt: skip
    for part in parts.values():
        part.write(part.cut(torch.arange(part.shape[0]).view(-1, *[1] * (len(part.shape) - 1)).expand(part.shape)))
    assert matrix.bias is not None
    assert matrix.bias.tolist() == matrix.weight[:, 0].tolist() == [4, 5, 6, 7, 2, 3]
    assert matrix.shape == (6, 3)
    assert matrix.plain is matrix.weight
