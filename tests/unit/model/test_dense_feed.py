"""Parity with transformers is checked in tests/parity, tensor ranks in tests/unit/model/test_decoder.py."""

from __future__ import annotations

import pytest
import torch

from tests.drivers.thread_ranks import run_ranks
from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.layer_spec import DenseFeedSpec, LayerSpec
from toka_async.model.activation_layout import Replicated
from toka_async.model.comm import LocalComm
from toka_async.model.dense_feed import DenseFeed
from toka_async.model.feed import build_feed
from toka_async.model.layers import RMSNorm
from toka_async.model.matrices.ops import TorchOps

OPS = TorchOps()


def layer_of(bias: bool) -> LayerSpec:
    attention = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, rope=None)
    return LayerSpec(attention, DenseFeedSpec(inner=6, activation="silu", bias=bias))


@pytest.mark.parametrize("with_hidden", [False, True])
def test_the_feed_of_a_norm(with_hidden: bool) -> None:
    feed, norm, layout = build_feed(layer_of(bias=True), 4, LocalComm(), OPS), RMSNorm(4, 1e-5, OPS), None
    assert isinstance(feed, DenseFeed)
    for parameter in (*feed.parameters(), norm.weight):
        parameter.normal_()
    residual, hidden = torch.randn(3, 4), torch.randn(3, 4) if with_hidden else None
    layout = Replicated(LocalComm())
    output, total = feed(hidden, residual, norm, layout)
    normed, expected = norm(hidden, residual)
    torch.testing.assert_close(total, expected)
    gate_up, down = feed.gate_up, feed.down
    inner = OPS.gate(gate_up.product(gate_up.take(normed)), "silu")
    torch.testing.assert_close(output, down.product(down.take(inner)))


def test_what_is_added_in_place() -> None:
    def uses(bias: bool, size: int = 1) -> list[tuple[str | None, bool, torch.dtype | None]]:
        def of_rank(comm: object) -> list[tuple[str | None, bool, torch.dtype | None]]:
            feed = DenseFeed(layer_of(bias), 4, comm, OPS)  # type: ignore[arg-type]
            return [(use.activation, use.adds, use.normed) for use in feed.uses(torch.float32)]

        return run_ranks(size, of_rank)[0]

    assert uses(bias=False) == [("silu", False, torch.float32), (None, True, None)]
    assert uses(bias=True) == uses(bias=False, size=2) == [("silu", False, torch.float32), (None, False, None)]
