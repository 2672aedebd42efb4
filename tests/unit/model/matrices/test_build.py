from __future__ import annotations

from typing import Any

import pytest

from tests.drivers.thread_ranks import run_ranks
from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.model.matrices import build
from toka_async.model.matrices.build import build_matrix
from toka_async.model.matrices.ops import TorchOps
from toka_async.model.matrices.share import Share, whole_of

QKV = MatrixSpec(names=("q", "k"), outputs=(Units(4, 8), Units(1, 8)), inputs=Units(6), split="outputs")
OUTPUT = MatrixSpec(names=("o",), outputs=(Units(6),), inputs=Units(4, 8), split="inputs", format="other")


def test_ranks_divide_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the format that the spec names."""
    assert run_ranks(2, lambda comm: build_matrix(QKV, comm, TorchOps()).shape) == [(16 + 8, 6)] * 2

    made: list[tuple[Any, ...]] = []
    monkeypatch.setitem(build.MATRICES, "other", lambda *arguments: made.append(arguments))
    run_ranks(2, lambda comm: build_matrix(OUTPUT, comm, TorchOps()))
    assert [each[2] for each in sorted(made, key=lambda each: each[2].start)] == [Share(32, 0, 16), Share(32, 16, 16)]
    assert [each[1] for each in made] == [[whole_of(6)]] * 2
