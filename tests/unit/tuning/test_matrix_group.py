from __future__ import annotations

from pathlib import Path

import torch

from tests.cases.models import make_checkpoint
from toka_async.checkpoint.spec import read_spec
from toka_async.model.weights import build_decoder
from toka_async.tuning.matrix_group import group_matrices


def test_matrices_that_are_used_alike_are_asked_for_once(tmp_path: Path) -> None:
    """Of equal shapes, others are used in another way: the output of attention, and query, key and value."""
    folder = make_checkpoint(
        tmp_path, "llama", hidden_size=64, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=64, num_hidden_layers=9,
    )  # fmt: skip
    groups = group_matrices(build_decoder(read_spec(folder), torch.float32, torch.device("meta")))
    assert [(group.use.matrix.shape, len(group.matrices)) for group in groups] == [
        ((128, 64), 8), ((64, 64), 8), ((64, 64), 8), ((64, 32), 8), ((64, 64), 1),
    ]  # fmt: skip
    assert [group.use.activation for group in groups] == [None, None, "silu", None, None]
    assert [group.use.adds for group in groups] == [False, True, False, True, False]
    assert [group.use.normed for group in groups] == [True, False, True, False, False]
    assert [group.use.of_samples for group in groups] == [False] * 4 + [True]
