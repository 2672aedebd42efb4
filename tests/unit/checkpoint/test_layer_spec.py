from __future__ import annotations

from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.layer_spec import DenseFeedSpec, LayerSpec
from toka_async.checkpoint.matrix_spec import Units

ATTENTION = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=8, rope=None)


def test_a_dense_feed_and_its_part_on_a_rank() -> None:
    feed = DenseFeedSpec(inner=72, activation="silu", bias=True)
    assert [feed.can_divide(tp) for tp in (1, 5, 8)] == [True, False, True]
    gate_up, down = feed.divide(8).list_matrices(48, "dense")
    assert (gate_up.outputs, gate_up.inputs, gate_up.split) == ((Units(9), Units(9)), Units(48), "outputs")
    assert (down.outputs, down.inputs, down.split) == ((Units(48),), Units(9), "inputs")
    assert gate_up.bias
    assert down.bias
    assert feed.divide(8).count_values(48) == 27


def test_exempt_matrices_are_dense() -> None:
    feed = DenseFeedSpec(inner=72, activation="silu", bias=False)
    layer = LayerSpec(ATTENTION, feed, format="fp8/channel", exempt=("mlp.down_proj",))
    assert [matrix.format for matrix in layer.list_feed_matrices(48)] == ["fp8/channel", "dense"]
    assert [matrix.format for matrix in LayerSpec(ATTENTION, feed).list_feed_matrices(48)] == ["dense", "dense"]
