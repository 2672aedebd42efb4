"""Parity with transformers is checked in tests/parity, tensor ranks in tests/unit/model/test_decoder.py."""

from __future__ import annotations

import pytest
import torch

from tests.drivers.thread_ranks import run_ranks
from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.experts_spec import ExpertNames, ExpertsFeedSpec
from toka_async.checkpoint.layer_spec import LayerSpec
from toka_async.model.activation_layout import Replicated
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.experts_feed import ExpertsFeed
from toka_async.model.feed import build_feed
from toka_async.model.layers import RMSNorm
from toka_async.model.matrices.ops import TorchOps

OPS = TorchOps()


def layer_of(num_groups: int = 1) -> LayerSpec:
    feed = ExpertsFeedSpec(
        inner=8,
        activation="silu",
        num_experts=4,
        top_k=2,
        renormalizes=True,
        names=ExpertNames("route", "many", "a", "b", "c"),
        num_groups=num_groups,
    )
    return LayerSpec(AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, rope=None), feed)


@pytest.mark.parametrize("with_hidden", [False, True])
def test_the_feed_of_a_norm(with_hidden: bool) -> None:
    feed, norm = build_feed(layer_of(), 6, LocalComm(), OPS), RMSNorm(6, 1e-5, OPS)
    assert isinstance(feed, ExpertsFeed)
    for parameter in (*feed.parameters(), norm.weight):
        parameter.normal_()
    residual, hidden = torch.randn(5, 6), torch.randn(5, 6) if with_hidden else None
    normed, expected = norm(hidden, residual)
    output, total = feed(hidden, residual, norm, Replicated(LocalComm()))
    assert output is None
    logits = feed.router.product(feed.router.take(normed))
    expected = OPS.mix_experts(normed, logits, feed.weights, expected)
    torch.testing.assert_close(total, expected)
    assert int(feed.loads.sum()) == 2 * 2 * 5  # the comparison counted too


@pytest.mark.parametrize(
    ("num_groups", "shapes"),
    [
        (1, [(0, (4, 4, 6), (4, 6, 2))] * 4),
        (2, [(0, (2, 8, 6), (2, 6, 4))] * 2 + [(2, (2, 8, 6), (2, 6, 4))] * 2),
        (4, [(first, (1, 16, 6), (1, 6, 8)) for first in range(4)]),
    ],
)
def test_what_each_of_four_ranks_holds(
    num_groups: int, shapes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
) -> None:
    def hold(comm: Comm) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        weights = ExpertsFeed(layer_of(num_groups), 6, comm, OPS).weights
        return weights.first, tuple(weights.gate_up.shape), tuple(weights.down.shape)

    assert run_ranks(4, hold) == shapes


@pytest.mark.parametrize("size", [1, 2])
def test_several_ranks_leave_their_router_to_torch(size: int) -> None:
    """Ranks whose routers rounded otherwise would choose other experts for the same token."""
    for num_uses in run_ranks(size, lambda comm: len([*ExpertsFeed(layer_of(), 6, comm, OPS).uses(normed=False)])):
        assert num_uses == (size == 1)


def test_every_rank_names_all_experts() -> None:
    def list_parts(comm: Comm) -> dict[str, tuple[tuple[int, ...], int]]:
        parts = ExpertsFeed(layer_of(2), 6, comm, OPS).parts()
        return {name: (part.shape, part.target.numel()) for name, part in parts}

    first, second = run_ranks(2, list_parts)
    assert first.keys() == second.keys()
    assert first["route.weight"] == second["route.weight"] == ((4, 6), 24)
    assert [(first[f"many.{number}.a.weight"], second[f"many.{number}.c.weight"]) for number in (1, 2)] == [
        (((8, 6), 48), ((6, 8), 0)),
        (((8, 6), 0), ((6, 8), 48)),
    ]
