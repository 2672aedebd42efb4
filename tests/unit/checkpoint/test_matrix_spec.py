from __future__ import annotations

import pytest

from toka_async.checkpoint import matrix_spec
from toka_async.checkpoint.matrix_spec import MatrixSpec, Units

QKV = MatrixSpec(
    names=("q", "k", "v"), outputs=(Units(6, 8), Units(2, 8), Units(2, 8)), inputs=Units(48), split="outputs", bias=True
)


def test_what_a_matrix_costs() -> None:
    assert (QKV.num_outputs, QKV.num_inputs) == (80, 48)
    assert QKV.count_bytes(2) == 2 * (80 * 48 + 80)
    assert QKV.count_read_bytes(7, 2) == 2 * 80 * 48
    assert QKV.count_flops(7) == 2 * 7 * 80 * 48


def test_a_format_says_what_its_weights_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix_spec.WEIGHT_BYTES, "half", lambda n, k, itemsize: n * k // 2 + n * itemsize)
    half = MatrixSpec(names=("o",), outputs=(Units(10),), inputs=Units(6), split="inputs", format="half")
    assert half.count_bytes(2) == half.count_read_bytes(1, 2) == 30 + 20
