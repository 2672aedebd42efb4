from __future__ import annotations

import pytest

from toka_async.checkpoint.names import find_text_name, is_of_other_part


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
        ("model.language_model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_of_text_parts(name: str, found: str) -> None:
    assert find_text_name(name) == found
    assert not is_of_other_part(name)


@pytest.mark.parametrize(
    "name", ["vision_tower.patch_conv.weight", "model.visual.blocks.0.norm.weight", "multi_modal_projector.norm.weight"]
)
def test_parts_that_see_or_hear_are_known(name: str) -> None:
    assert is_of_other_part(name)
