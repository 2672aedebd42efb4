"""Splitting a decoder over ranks changes nothing; what it computes is checked against transformers in tests/parity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases.models import make_checkpoint
from tests.drivers.thread_ranks import run_ranks
from tests.fakes.mean_attention import TOKENS, load, run
from toka_async.model.comm import LocalComm


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("qwen2", 2), ("qwen3", 3), ("mistral", 3)], ids=str)
def test_ranks_together_equal_one(tmp_path: Path, family: str, size: int) -> None:
    folder = make_checkpoint(
        tmp_path,
        family,
        num_key_value_heads=size,
        attention_bias=family in ("llama", "qwen3"),
        mlp_bias=family == "llama",
    )
    alone = run(load(folder, LocalComm()), num_kv_heads=size)
    assert alone.shape == (TOKENS, 261)
    for logits in run_ranks(size, lambda comm: run(load(folder, comm))):
        torch.testing.assert_close(logits, alone, atol=1e-9, rtol=1e-9)


def test_alone_nothing_is_exchanged() -> None:
    x = torch.randn(3)
    assert LocalComm().all_reduce(x) is x
    assert LocalComm().all_gather(x, 0) is x
    assert LocalComm().all_to_all(x) is x
    assert LocalComm().reduce_scatter(x) is x
