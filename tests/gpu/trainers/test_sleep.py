"""An engine on a GPU that sleeps and wakes up, with graphs that were captured before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases.models import heads, make_checkpoint
from tests.drivers.weight_updates import Trainer, read_checkpoint
from toka_async.control import Pause, Resume, Sleep, Wake

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_graphs_are_valid_after_sleep_and_updates(tmp_path: Path) -> None:
    from tests.drivers.engine import Engine

    shape = heads(4, 2, 256, head_dim=64, intermediate_size=512)
    for seed, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        make_checkpoint(tmp_path / name, "qwen3", seed=seed, **shape)
    # The second engine computes products as the first one chose: others may round otherwise.
    options = {"device": "cuda", "dtype": "bfloat16", "tuning_dir": str(tmp_path / "tuning")}
    engine = Engine(tmp_path / "old", **options)  # type: ignore[arg-type]
    started = Engine(tmp_path / "new", **options)  # type: ignore[arg-type]
    trainer, prompts = Trainer(engine), [[1, 2, 3, 4] * 9, [5] * 30]
    first = [each.samples[0].token_ids for each in engine.run(prompts)]
    trainer.act(Pause(mode="abort"))
    awake = engine.control.count_mapped_bytes()
    assert trainer.act(Sleep()).error == ""
    assert engine.control.count_mapped_bytes() == 0
    assert trainer.act(Wake()).error == ""
    assert engine.control.count_mapped_bytes() == awake > 0
    trainer.act(Resume())
    assert [each.samples[0].token_ids for each in engine.run(prompts)] == first
    trainer.update([*read_checkpoint(tmp_path / "new").items()])
    assert trainer.sums() == Trainer(started).sums()
    tokens = [[each.samples[0].token_ids for each in one.run(prompts)] for one in (engine, started)]
    assert tokens[0] == tokens[1]
