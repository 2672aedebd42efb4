from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.fakes.states import (
    MAX_SEQS,
    SHAPE,
    compute_by_token,
    make_batch,
    make_cache,
    make_inputs,
    make_weights,
    split_z,
)
from toka_async.attention.states.triton_ops import TritonStateOps
from toka_async.kernels.delta.layer import DeltaShape

SQUARE = DeltaShape(num_key_heads=1, num_value_heads=1, key_dim=32, value_dim=32, width=2)
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 8e-2}


@pytest.mark.parametrize(
    ("decode", "chunks", "saves", "shape", "dtype"),
    [
        ([4, 0, 2], [], [], SHAPE, torch.float32),
        ([1], [(0, 2), (5, 70), (3, 65)], [], SHAPE, torch.float32),
        ([], [(2, 80), (4, 3)], [(0, 1, 0), (0, 70, 1), (1, 3, 2)], SHAPE, torch.float32),
        ([0, 5], [(2, 70)], [(0, 64, 0)], SQUARE, torch.float32),
        ([3], [(1, 40)], [], SHAPE, torch.bfloat16),
    ],
    ids=["decode", "several pieces", "kept states", "square", "bfloat16"],
)
def test_kernels_compute_what_single_tokens_do(
    decode: list[int],
    chunks: list[tuple[int, int]],
    saves: list[tuple[int, int, int]],
    shape: DeltaShape,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    weights = make_weights(shape, dtype, device)
    batch = make_batch(decode, chunks, saves, device)
    projected, gates = make_inputs(shape, int(batch.query_lengths.sum()), dtype, device)
    inputs, z = split_z(shape, projected)
    ours, exact = (make_cache(shape, dtype, device) for _ in range(2))
    ops = TritonStateOps(ours)
    ops.plan(batch)
    output = ops.compute(1, inputs, z, gates, weights)
    expected = compute_by_token(exact, 1, batch, projected, gates, weights)
    assert output.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.recurrent, exact.recurrent, atol=tolerance, rtol=tolerance)
    assert torch.equal(ours.inputs, exact.inputs)


def test_equal_keys_do_not_lose_digits(device: torch.device) -> None:
    """The system of a piece is hardest where all keys are alike and nothing decays."""
    weights = make_weights(SHAPE, torch.float32, device)
    weights.log_decay.fill_(-20)
    batch = make_batch([], [(0, 64)], [], device)
    projected, gates = make_inputs(SHAPE, 64, torch.float32, device)
    inputs, z = split_z(SHAPE, projected)
    projected[:, : SHAPE.num_channels] = projected[0, : SHAPE.num_channels]
    gates[:, : SHAPE.num_value_heads] = 4
    ours, exact = (make_cache(SHAPE, torch.float32, device) for _ in range(2))
    ops = TritonStateOps(ours)
    ops.plan(batch)
    output = ops.compute(0, inputs, z, gates, weights)
    expected = compute_by_token(exact, 0, batch, projected, gates, weights)
    torch.testing.assert_close(output.double(), expected, atol=2e-3, rtol=2e-3)


def test_padding_changes_no_state(device: torch.device) -> None:
    weights = make_weights(SHAPE, torch.float32, device)
    batch = make_batch([2, MAX_SEQS, MAX_SEQS], [], [], device)
    projected, gates = make_inputs(SHAPE, 3, torch.float32, device)
    inputs, z = split_z(SHAPE, projected)
    cache = make_cache(SHAPE, torch.float32, device)
    recurrent, newest = cache.recurrent.clone(), cache.inputs.clone()
    ops = TritonStateOps(cache)
    ops.plan_graph(batch)
    output = ops.compute(0, inputs, z, gates, weights)
    assert output.isfinite().all()
    others = [number for number in range(len(recurrent)) if number != 2]
    assert torch.equal(cache.recurrent[others], recurrent[others])
    assert torch.equal(cache.inputs[others], newest[others])
    assert not torch.equal(cache.recurrent[2, 0], recurrent[2, 0])
