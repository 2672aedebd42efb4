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
    assert [group.use.normed for group in groups] == [torch.float32, None, torch.float32, None, None]
    assert [group.use.of_samples for group in groups] == [False] * 4 + [True]


def test_norms_whose_factors_are_wider_than_the_rest(tmp_path: Path) -> None:
    """Those that add one to a checkpoint's weights, which would round the sums."""
    for family, normed in (("llama", torch.bfloat16), ("qwen3_5_text", torch.float32)):
        spec = read_spec(make_checkpoint(tmp_path / family, family))
        groups = group_matrices(build_decoder(spec, torch.bfloat16, torch.device("meta")))
        assert {group.use.normed for group in groups} == {None, normed}
