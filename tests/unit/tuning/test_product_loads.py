from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.cases.models import make_checkpoint
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import read_spec
from toka_async.model.matrices.dense import DenseMatrix
from toka_async.model.matrices.matrix import Rows
from toka_async.model.weights import build_decoder
from toka_async.tuning.product_loads import list_row_counts, load_products


def test_small_products_have_all_numbers_of_rows() -> None:
    assert [*list_row_counts(20)] == [8, 16, 20]
    assert [*list_row_counts(1)] == [1]
    counts = [*list_row_counts(20_000)]
    assert counts[:128] == [*range(8, 1025, 8)]
    assert counts[-1] == 20_000
    assert all(first < then <= first * 33 // 32 + 8 for first, then in pairwise(counts))


def test_each_shape_is_computed_as_steps_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the head computes fewer rows; products are added, gated or neither, and norms are left to what follows."""
    computed: dict[tuple[str, tuple[int, int]], list[int]] = {}
    normed: set[tuple[str, tuple[int, int]]] = set()

    def watch(name: str) -> None:
        method = getattr(DenseMatrix, name)

        def note(matrix: DenseMatrix, *arguments: object) -> object:
            rows = next(each for each in arguments if isinstance(each, Rows))
            computed.setdefault((name, matrix.shape), []).append(len(rows.values))
            if rows.norm is not None:
                normed.add((name, matrix.shape))
            return method(matrix, *arguments)

        monkeypatch.setattr(DenseMatrix, name, note)

    folder = make_checkpoint(tmp_path, "llama", tie_word_embeddings=False)
    spec = read_spec(folder)
    decoder = build_decoder(spec, torch.float32, torch.device("cpu"))
    for name in ("product", "gated", "add"):
        watch(name)
    load_products(decoder, RankLimits(max_context=64, max_seqs=9, max_tokens=20), torch.float32, torch.device("cpu"))
    kinds = {name for name, _ in computed}
    assert kinds == {"product", "gated", "add"}
    assert computed["product", (spec.vocab_size, spec.hidden_size)] == [8, 9]
    assert all(rows == [8, 16, 20] for (_, shape), rows in computed.items() if shape[0] != spec.vocab_size)
    own = {(name, shape) for name, shape in computed if shape[0] != spec.vocab_size}
    assert normed == {(name, shape) for name, shape in own if name != "add"}
