from __future__ import annotations

from pathlib import Path

import torch

from tests.cases.models import make_checkpoint
from toka_async.bench.products import list_matrices
from toka_async.checkpoint.spec import read_spec
from toka_async.model.weights import build_decoder


def test_the_matrices_are_those_of_the_model(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "llama", num_hidden_layers=1, tie_word_embeddings=True))
    decoder = build_decoder(spec, torch.float32, torch.device("cpu"))
    shapes = [use.matrix.shape for use in decoder.uses()]
    matrices = list_matrices(spec, normed=True)
    assert sorted((matrix.n, matrix.k) for matrix in matrices) == sorted(shapes)
    assert [matrix.name for matrix in matrices if matrix.normed] == ["qkv", "gate_up"]
