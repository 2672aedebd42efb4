"""A model with 8-bit weights over several ranks: its tokens are those of the model that they stand for."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cases.models import make_checkpoint
from tests.cases.quantized import BLOCKS, CHANNELS, SIZES, dequantize_checkpoint, quantize_checkpoint
from tests.processes.greedy_reference import ask_all, check_greedy
from tests.processes.serving import serving


@pytest.mark.parametrize("as_published", [True, False])
def test_greedy_tokens_equal_those_of_dequantized_weights(tmp_path: Path, as_published: bool) -> None:
    """A published checkpoint on tensor ranks, and one that is quantized as stages load it."""
    dense = make_checkpoint(tmp_path / "dense", "qwen3", seed=5, **SIZES)
    folder = quantize_checkpoint(dense, tmp_path / "quantized", BLOCKS if as_published else CHANNELS)
    how = (f"model.path={folder}", "parallel.tp=2") if as_published else (f"model.path={dense}", "parallel.pp=2")
    options = () if as_published else ("model.quantize=fp8",)
    with serving(tmp_path, *how, "model.served_name=m", *options) as server:
        answers = ask_all(server)
        server.signal_group(signal.SIGTERM)
        assert server.wait_for_all() == 0
    check_greedy(dequantize_checkpoint(folder, tmp_path / "exact"), answers)
