from __future__ import annotations

import pytest

from toka_async.checkpoint.names import StoredPart, find_text_name, is_of_other_part, list_stored_parts


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


def test_the_scale_of_a_matrix_has_two_names_and_may_be_a_number() -> None:
    known = {"a.weight", "a.weight_scale"}
    assert list_stored_parts("a.weight_scale_inv", [], known) == [StoredPart("a.weight_scale", (1,))]
    assert list_stored_parts("a.weight_scale", [1], known) == [StoredPart("a.weight_scale", (1,))]
    assert list_stored_parts("b.weight_scale_inv", [2, 3], known) == [StoredPart("b.weight_scale_inv", (2, 3))]
