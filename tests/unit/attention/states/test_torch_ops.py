from __future__ import annotations

import pytest
import torch

from tests.fakes.states import SHAPE, compute_by_token, make_batch, make_cache, make_inputs, make_weights, split_z
from toka_async.attention.states.torch_ops import TorchStateOps

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("decode", "chunks", "saves"),
    [
        ([4, 0, 2], [], []),
        ([], [(1, 1)], []),
        ([3], [(0, 2), (5, 70), (1, 128)], []),
        ([], [(2, 150), (4, 3)], [(0, 1, 0), (0, 130, 1), (1, 3, 2)]),
    ],
    ids=["decode", "one", "several pieces", "kept states"],
)
def test_pieces_compute_what_single_tokens_do(
    decode: list[int], chunks: list[tuple[int, int]], saves: list[tuple[int, int, int]]
) -> None:
    weights = make_weights(SHAPE, torch.float32, CPU)
    batch = make_batch(decode, chunks, saves, CPU)
    projected, gates = make_inputs(SHAPE, int(batch.query_lengths.sum()), torch.float32, CPU)
    inputs, z = split_z(SHAPE, projected)
    ours, exact = (make_cache(SHAPE, torch.float32, CPU) for _ in range(2))
    ops = TorchStateOps(ours)
    ops.plan(batch)
    output = ops.compute(1, inputs, z, gates, weights)
    expected = compute_by_token(exact, 1, batch, projected, gates, weights)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours.recurrent, exact.recurrent, atol=1e-5, rtol=1e-4)
    assert torch.equal(ours.inputs, exact.inputs)


def test_chunks_cut_anywhere_give_the_same_state() -> None:
    weights = make_weights(SHAPE, torch.float32, CPU)
    projected, gates = make_inputs(SHAPE, 90, torch.float32, CPU)
    inputs, z = split_z(SHAPE, projected)
    whole, cut = (make_cache(SHAPE, torch.float32, CPU) for _ in range(2))
    ops = TorchStateOps(whole)
    ops.plan(make_batch([], [(0, 90)], [], CPU))
    expected = ops.compute(0, inputs, z, gates, weights)
    ops, outputs, first = TorchStateOps(cut), [], 0
    for length in (1, 2, 60, 1, 26):
        ops.plan(make_batch([], [(0, length)], [], CPU))
        tokens = slice(first, first + length)
        outputs.append(ops.compute(0, inputs[tokens], z[tokens], gates[tokens], weights))
        first += length
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(cut.recurrent, whole.recurrent, atol=1e-5, rtol=1e-4)
