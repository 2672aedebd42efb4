"""That the bytes are those of the modules, tests/unit/test_capacity.py checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.models import make_checkpoint
from toka_async.checkpoint.cost import count_layer_bytes, count_stage_bytes
from toka_async.checkpoint.spec import read_spec


@pytest.mark.parametrize("tied", [False, True])
def test_stages_add_up(tmp_path: Path, tied: bool) -> None:
    """But for a tied head, of which a last stage that is not the first has a copy."""
    spec = read_spec(make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=tied))
    layers = [count_layer_bytes(spec, layer, 2) for layer in range(spec.num_layers)]
    table = 2 * spec.vocab_size * spec.hidden_size
    assert count_stage_bytes(spec, False, False, 2) == sum(layers)
    assert count_stage_bytes(spec, True, False, 2) == sum(layers) + table
    assert count_stage_bytes(spec, False, True, 2) == sum(layers) + table + 2 * spec.hidden_size
    assert count_stage_bytes(spec, True, True, 2) == sum(layers) + (2 - tied) * table + 2 * spec.hidden_size
