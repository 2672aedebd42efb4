"""Parity with transformers is checked in tests/parity, tensor ranks in tests/unit/model/test_decoder.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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


def layer_of(num_groups: int = 1, is_stacked: bool = False, format: str = "dense") -> LayerSpec:
    """is_stacked: as gpt-oss has them, with biases."""
    feed = ExpertsFeedSpec(
        inner=8,
        activation="clamped_swiglu" if is_stacked else "silu",
        num_experts=4,
        top_k=2,
        renormalizes=True,
        names=ExpertNames("route", "many", "a", "b", "c", "ab" if is_stacked else ""),
        bias=is_stacked,
        num_groups=num_groups,
    )
    mixer = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, rope=None)
    return LayerSpec(mixer, feed, format=format, exempt=("route",))


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
    for num_uses in run_ranks(size, lambda comm: len([*ExpertsFeed(layer_of(), 6, comm, OPS).uses(normed=None)])):
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


def split_gate_up(numbers: Tensor) -> Tensor:
    """Outputs of gate and up in turns, in the second dimension, to all of the gate's before those of up."""
    return torch.cat([numbers[:, ::2], numbers[:, 1::2]], 1)


@pytest.mark.parametrize(("num_ranks", "num_groups"), [(1, 1), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("format", ["dense", "fp8/channel"])
def test_stacked_experts_are_transposed_and_their_outputs_sorted(num_ranks: int, num_groups: int, format: str) -> None:
    """Ranks of a group hold parts of the units; one of them adds what the experts add to their outputs."""
    shapes = {"ab": (4, 6, 16), "ab_bias": (4, 16), "c": (4, 8, 6), "c_bias": (4, 6)}
    stored = {f"many.{name}": torch.randn(shape) for name, shape in shapes.items()}
    gate_up, bias = split_gate_up(stored["many.ab"].transpose(1, 2)), split_gate_up(stored["many.ab_bias"])

    def load(comm: Comm) -> ExpertsFeed:
        feed = ExpertsFeed(layer_of(num_groups, is_stacked=True, format=format), 6, comm, OPS)
        parts = dict(feed.parts())
        assert parts.keys() == {*stored, "route.weight", "route.bias"}
        for name, tensor in stored.items():
            assert parts[name].shape == tensor.shape
            parts[name].write(parts[name].cut(tensor))
        return feed

    per_group = num_ranks // num_groups
    for rank, feed in enumerate(run_ranks(num_ranks, load)):
        weights, inner = feed.weights, 8 // per_group
        held = slice(weights.first, weights.first + 4 // num_groups)
        units = slice(rank % per_group * inner, (rank % per_group + 1) * inner)
        rows = torch.cat([torch.arange(8)[units], torch.arange(8, 16)[units]])
        for values, scales, exact in (
            (weights.gate_up, weights.gate_up_scales, gate_up[held][:, rows]),
            (weights.down, weights.down_scales, stored["many.c"].transpose(1, 2)[held][:, :, units]),
        ):
            numbers = values.float() if scales is None else values.float() * scales[..., None]
            close = {"atol": 0, "rtol": 0} if scales is None else {"atol": 1e-4, "rtol": 0.07}  # FP8's smallest numbers
            torch.testing.assert_close(numbers, exact, **close)
        assert weights.gate_up_bias is not None
        assert torch.equal(weights.gate_up_bias, bias[held][:, rows])
        assert (weights.down_bias is None) == (rank % per_group > 0)
        if weights.down_bias is not None:
            assert torch.equal(weights.down_bias, stored["many.c_bias"][held])
