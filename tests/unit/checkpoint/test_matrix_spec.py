from __future__ import annotations

import pytest
from msgspec.structs import replace

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


def test_quantized_weights_take_a_byte_and_their_scales() -> None:
    blocks = MatrixSpec(names=("o",), outputs=(Units(256),), inputs=Units(384), split="inputs", format="fp8/block")
    assert blocks.count_bytes(2) == 256 * 384 + 4 * 2 * 3
    assert blocks.has_whole_blocks
    assert not replace(blocks, inputs=Units(380)).has_whole_blocks
    assert replace(blocks, inputs=Units(380), format="fp8/channel").has_whole_blocks
    assert replace(blocks, format="fp8/channel").count_bytes(2) == 256 * 384 + 4 * 256
    assert QKV.has_whole_blocks
