"""A second start goes by what the first one measured, and computes the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.drivers.engine import Engine
from tests.drivers.gpu_models import make_model
from toka_async.messages import TokenSampling
from toka_async.tuning.algorithms import AlgorithmChoice
from toka_async.tuning.attention import AttentionChoice
from toka_async.tuning.few_rows import FewRowsChoice
from toka_async.tuning.gated_tiles import GatedTileChoice
from toka_async.tuning.graph_sizes import GraphChoice

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_second_start_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tuning_dir = make_model(tmp_path / "model", "llama"), tmp_path / "tuning"

    def start() -> tuple[Engine, list[tuple[list[int], list[float]]]]:
        engine = Engine(
            folder,
            device="cuda",
            dtype="bfloat16",
            max_seqs=128,
            max_tokens=512,
            max_graph_seqs=64,
            tuning_dir=str(tuning_dir),
        )
        sampling = TokenSampling(temperature=0.8, num_logprobs=0)
        received = engine.run([[*range(40, 240)], [50, 60]], n=48, max_tokens=24, sampling=sampling)
        samples = [sample for each in received for sample in each.samples]
        return engine, [(sample.token_ids, sample.logprobs) for sample in samples]

    first, expected = start()
    kept = {path: path.read_bytes() for path in tuning_dir.iterdir()}
    kinds = {path.name.rpartition("-")[0] for path in kept}
    assert kinds >= {"product", "few-rows", "attention", "graphs"}
    assert ("gated-product" in kinds) == (torch.cuda.get_device_capability() >= (9, 0))
    for choice in (AlgorithmChoice, AttentionChoice, FewRowsChoice, GatedTileChoice, GraphChoice):
        monkeypatch.setattr(choice, "measure", None)
    second, samples = start()
    assert samples == expected
    assert {path: path.read_bytes() for path in tuning_dir.iterdir()} == kept
    graphs = [engine.runner.decode.graphs for engine in (first, second) if engine.runner.decode is not None]
    assert graphs[0] is not None
    assert graphs[1] is not None
    assert graphs[0].sizes == graphs[1].sizes
