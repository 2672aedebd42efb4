"""A model split over several rank processes: its tokens. What becomes of it when one of them dies is in test_life."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.cases.models import make_checkpoint
from tests.cases.quantized import BLOCKS, SIZES, dequantize_checkpoint, quantize_checkpoint
from tests.processes.greedy_reference import ask_all, check_greedy
from tests.processes.serving import serving

SHAPE: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
GROUPED = ("schedule.group_min_seqs=2", "schedule.group_min_tokens=16")  # two prompts share 200 tokens
IN_SHARDS = ("parallel.async_tp_min_tokens=3",)  # steps of prompts, and of several rows


@pytest.mark.parametrize(
    ("tp", "family", "options"),
    [
        (2, "qwen3", (*GROUPED, *IN_SHARDS)),
        pytest.param(4, "qwen2", (), marks=pytest.mark.slow),
        (2, "gpt_oss", ()),
        (2, "qwen3_next", (*GROUPED, *IN_SHARDS)),
        (2, "qwen3_moe", ("parallel.ep=2", *GROUPED, *IN_SHARDS)),
        (4, "qwen3_moe", ("parallel.ep=4",)),
    ],
)
def test_greedy_tokens_equal_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, family: str, options: tuple[str, ...]
) -> None:
    """Two KV heads: of two ranks each has one, of four two each have the same. Nothing stays of where they met."""
    place = Path(tempfile.mkdtemp())  # with a path short enough for sockets
    monkeypatch.setenv("TMPDIR", str(place))
    folder = make_checkpoint(tmp_path / "model", family, seed=5, tie_word_embeddings=tp == 4, **SHAPE)
    options = (f"model.path={folder}", "model.served_name=m", f"parallel.tp={tp}", *options)
    with serving(tmp_path, *options) as server:
        assert {f"rank-0-{rank}" for rank in range(tp)} < set(server.children)
        answers = ask_all(server)
        server.signal_group(signal.SIGTERM)
        assert server.wait_for_all() == 0
    assert not list(place.glob("toka-*"))
    shutil.rmtree(place)
    check_greedy(folder, answers)


def test_8_bit_weights_with_scales_by_block(tmp_path: Path) -> None:
    """The tokens are those of the model that the weights stand for."""
    dense = make_checkpoint(tmp_path / "dense", "qwen3", seed=5, **SIZES)
    folder = quantize_checkpoint(dense, tmp_path / "quantized", BLOCKS)
    with serving(tmp_path, f"model.path={folder}", "model.served_name=m", "parallel.tp=2") as server:
        answers = ask_all(server)
        server.signal_group(signal.SIGTERM)
        assert server.wait_for_all() == 0
    check_greedy(dequantize_checkpoint(folder, tmp_path / "exact"), answers)
