from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
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
from toka_async.attention.base import AttentionBatch, ChunkRows
from toka_async.attention.states import triton_ops
from toka_async.attention.states.torch_ops import TorchStateOps
from toka_async.attention.states.triton_ops import TritonStateOps
from toka_async.kernels.delta import step
from toka_async.kernels.delta.chunks import choose_programs, count_programs
from toka_async.kernels.delta.layer import DeltaShape, Programs

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
        ([], [(1, 70)], [(0, 64, 0), (0, 66, 2)], SHAPE, torch.bfloat16),
    ],
    ids=["decode", "several pieces", "kept states", "square", "bfloat16", "kept states, bfloat16"],
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


@pytest.mark.parametrize("num_programs", [1, 2])
def test_beside_rows_a_program_solves_several_pieces(
    num_programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All four pieces, or two. What comes out has the same bits as with a program for each."""
    weights, batch = make_weights(SHAPE, torch.float32, device), make_batch([4], [(2, 70), (0, 5)], [], device)
    projected, gates = make_inputs(SHAPE, int(batch.query_lengths.sum()), torch.float32, device)
    inputs, z = split_z(SHAPE, projected)
    results = []
    for most in (num_programs, 4):
        monkeypatch.setattr(triton_ops, "count_programs", lambda *_, most=most: Programs(most, 16, 1))
        cache = make_cache(SHAPE, torch.float32, device)
        ops = TritonStateOps(cache)
        ops.plan(batch)
        assert ops._chunks is not None
        assert ops._chunks.programs.pieces == most
        results.append((ops.compute(0, inputs, z, gates, weights), cache.recurrent))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_chunks_alone_have_a_program_for_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "count_programs", lambda *_: Programs(1, 1, 1))
    cpu = torch.device("cpu")
    ops = TritonStateOps(make_cache(SHAPE, torch.float32, cpu))
    ops.plan(make_batch([], [(2, 70), (0, 5)], [], cpu))
    assert ops._chunks is not None
    assert ops._chunks.programs == Programs(4, 2, 2)


def test_cells_say_which_programs_take_part(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """If they say more than are started, pieces and chunks are missed."""
    monkeypatch.setattr(triton_ops, "count_programs", lambda *_: Programs(2, 16, 2))
    for module, kind in ((torch, "empty"), (torch.Tensor, "new_empty")):  # what is missed is zero
        monkeypatch.setattr(module, kind, getattr(module, kind.replace("empty", "zeros")))
    weights, batch = make_weights(SHAPE, torch.float32, device), make_batch([4], [(2, 70), (0, 5)], [], device)
    projected, gates = make_inputs(SHAPE, int(batch.query_lengths.sum()), torch.float32, device)
    inputs, z = split_z(SHAPE, projected)

    def compute(pieces: int, readers: int) -> torch.Tensor:
        cache = make_cache(SHAPE, torch.float32, device)
        ops = TritonStateOps(cache)
        ops.plan(batch)
        assert ops._chunks is not None
        assert ops._chunks.counts.tolist() == [4, 2, 2, 2]
        ops._chunks = replace(ops._chunks, programs=Programs(pieces, 2, readers))
        ops.compute(0, inputs, z, gates, weights)
        return cache.recurrent[:, 0]

    whole, half_solved, half_read = compute(2, 2), compute(1, 2), compute(2, 1)
    assert not torch.equal(half_solved[2], whole[2])
    assert torch.equal(half_read[2], whole[2])
    assert torch.equal(half_read[0], make_cache(SHAPE, torch.float32, device).recurrent[0, 0])


@pytest.mark.parametrize(
    ("heads", "capability", "num_pieces", "expected"),
    [
        (32, (9, 0), 128, (12, 16, 4)),  # three times 128 programs on 132 multiprocessors
        (8, (9, 0), 128, (48, 16, 16)),
        (256, (9, 0), 128, (3, 16, 1)),  # at least one for each head and place
        (32, (9, 0), 3, (3, 16, 4)),
        (32, (10, 0), 8192, (8192, 16, 4)),  # none solves several
    ],
)
def test_programs_are_as_many_as_run_at_once(
    heads: int,
    capability: tuple[int, int],
    num_pieces: int,
    expected: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_gpu(monkeypatch, capability)
    assert count_programs(heads, torch.device("cuda")).limit(num_pieces, 20) == Programs(*expected)


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "expected"),
    [
        (508, 512, (4, 1)),
        (508, 3000, (4, 1)),
        (1500, 7900, (4, 2)),
        (508, 4096, (8, 2)),
        (508, 7168, (8, 2)),  # both take about as long
        (256, 3000, (8, 2)),
        (380, 9000, (8, 3)),
        (256, 7168, (8, 4)),
        (64, 2048, (12, 4)),  # rows end long before chunks
        (0, 7168, (12, 4)),
    ],
)
def test_programs_leave_room_for_rows(num_rows: int, num_tokens: int, expected: tuple[int, int]) -> None:
    chosen = choose_programs(num_rows, num_tokens, Programs(12, 16, 4))
    assert (chosen.pieces, chosen.readers) == expected


def test_without_a_loop_all_programs_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    make_gpu(monkeypatch, (10, 0))
    most = count_programs(32, torch.device("cuda"))
    assert choose_programs(508, 2048, most).limit(40, 2) == Programs(40, 2, 1)


def test_a_step_without_a_graph_has_as_many_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are of all programs, not of those that few pieces and chunks leave."""
    monkeypatch.setattr(triton_ops, "count_programs", lambda *_: Programs(12, 16, 4))
    ops = TritonStateOps(make_cache(SHAPE, torch.float32, device))
    ops.plan(make_batch([0, 1, 3, 4], [(2, 70), (5, 5)], [], device))  # 19 tokens a row
    assert ops._chunks is not None
    assert ops._chunks.programs == Programs(4, 2, 2)


def make_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Makes torch describe a GPU of 132 multiprocessors."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


@pytest.mark.parametrize("ops", [TritonStateOps, TorchStateOps])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_states_of_16_bits_are_rounded_when_they_are_stored(
    ops: type[TritonStateOps | TorchStateOps], stored: torch.dtype, device: torch.device
) -> None:
    """Between load and store they are what they are in float32, also through the pieces of a chunk."""
    weights, batch = make_weights(SHAPE, torch.float32, device), make_batch([4, 0], [(2, 70)], [(0, 64, 0)], device)
    projected, gates = make_inputs(SHAPE, int(batch.query_lengths.sum()), torch.float32, device)
    inputs, z = split_z(SHAPE, projected)
    rounded, exact = (make_cache(SHAPE, torch.float32, device, stored=each) for each in (stored, torch.float32))
    exact.recurrent.copy_(rounded.recurrent)
    outputs = []
    for cache in (rounded, exact):
        computing = ops(cache)
        computing.plan(batch)
        outputs.append(computing.compute(1, inputs, z, gates, weights))
    assert torch.equal(*outputs)
    assert torch.equal(rounded.recurrent, exact.recurrent.to(stored))


def test_many_rows_are_normed_in_a_pass_of_its_own(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_FEW_ROWS", 0)
    monkeypatch.setattr(step, "_COLUMNS", 16)
    test_kernels_compute_what_single_tokens_do([4, 0, 2], [(5, 3)], [], SHAPE, torch.float32, device)


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


class Graph:
    """The tensors of a captured step, planned once for all steps."""

    def __init__(self, ops: TritonStateOps, num_tokens: int, num_rows: int, device: torch.device) -> None:
        self.ops = ops
        self.cells = torch.zeros(ops.count_cells(num_tokens, num_rows), dtype=torch.int32, device=device)
        none = np.ones(num_rows, np.int32)
        self.batch = AttentionBatch(
            num_decode=num_rows,
            query_lengths=none,
            context_lengths=none,
            contexts=torch.zeros(num_rows, dtype=torch.int32, device=device),
            slots=torch.full((num_rows,), MAX_SEQS, dtype=torch.int64, device=device),
            page_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
            write_indices=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        )

    def fill(self, batch: AttentionBatch) -> None:
        self.batch.contexts.zero_()
        self.batch.contexts[: batch.num_decode] = 9
        self.batch.slots.fill_(MAX_SEQS)
        self.batch.slots[: len(batch.slots)] = batch.slots
        cells, behind = np.zeros(len(self.cells), np.int32), slice(batch.num_decode, None)
        assert batch.states is not None
        of_chunks = batch.query_lengths[behind], batch.context_lengths[behind].astype(np.int64), batch.states
        sizes = len(self.batch.write_indices), self.batch.num_decode, batch.num_decode
        self.ops.describe(cells, ChunkRows(*sizes, *of_chunks))
        self.cells.copy_(torch.from_numpy(cells))
        self.ops.plan_mixed(self.batch, self.cells)


def test_a_graph_computes_any_step_of_its_size(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer programs than there are pieces and chunks, padding, and each step after the other's states."""
    monkeypatch.setattr(triton_ops, "count_programs", lambda *_: Programs(2, 2, 2))
    weights = make_weights(SHAPE, torch.float32, device)
    ours, exact = (make_cache(SHAPE, torch.float32, device) for _ in range(2))
    ops = TritonStateOps(ours)
    graph = Graph(ops, 48, 6, device)
    steps = [
        make_batch([4, 0], [(5, 40), (3, 1), (1, 4)], [(0, 7, 0), (2, 4, 1)], device),
        make_batch([], [(2, 20)], [], device),
        make_batch([1, 3, 2, 0], [], [], device),
        make_batch([1, 3, 2, 0], [(4, 9), (5, 3)], [], device),  # of which one program takes all
        make_batch([], [(number, 8) for number in range(6)], [(1, 8, 2)], device),
    ]
    for seed, batch in enumerate(steps):
        num_tokens = int(batch.query_lengths.sum())
        projected, gates = make_inputs(SHAPE, 48, torch.float32, device, seed)
        inputs, z = split_z(SHAPE, projected)
        graph.fill(batch)
        output = ops.compute(1, inputs, z, gates, weights)
        expected = compute_by_token(exact, 1, batch, projected[:num_tokens], gates[:num_tokens], weights)
        torch.testing.assert_close(output[:num_tokens].double(), expected, atol=5e-4, rtol=5e-4)
        torch.testing.assert_close(ours.recurrent, exact.recurrent, atol=5e-4, rtol=5e-4)
        assert torch.equal(ours.inputs, exact.inputs)


def test_graphs_are_captured_without_a_step(device: torch.device) -> None:
    """Cells are zeros then."""
    cache = make_cache(SHAPE, torch.float32, device)
    ops, before = TritonStateOps(cache), cache.recurrent.clone()
    graph = Graph(ops, 48, 6, device)
    ops.plan_mixed(graph.batch, graph.cells)
    projected, gates = make_inputs(SHAPE, 48, torch.float32, device)
    ops.compute(1, *split_z(SHAPE, projected), gates, make_weights(SHAPE, torch.float32, device))
    assert torch.equal(cache.recurrent, before)


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
