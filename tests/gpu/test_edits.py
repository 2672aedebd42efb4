"""Rows with min_tokens, logit bias, penalties and likeliest tokens on a GPU: in graphs, while the host goes on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.drivers.engine import Engine
from tests.drivers.gpu_models import WatchedEngine, make_model
from tests.drivers.sampler_bench import VOCAB, Bench
from toka_async.arrays import f32_column, i32_column
from toka_async.checkpoint.hub import resolve_model
from toka_async.kernels.sampling.edit import NUM_TOP, EditKernels, EditTable, RowTokens
from toka_async.kernels.sampling.kernels import RowTable, SamplingKernels
from toka_async.kernels.sampling.row import RAW
from toka_async.messages import TokenSampling
from toka_async.model import penalties
from toka_async.model.logprobs import distribution, select_logprobs
from toka_async.model.penalties import Penalties
from toka_async.model.sampling import Flag

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")
LARGE = 128256
PAGE_SIZE = 16

SAMPLINGS = {
    "min_tokens": TokenSampling(temperature=0.8, min_tokens=12, end_ids=i32_column(range(0, 250, 2))),
    "logit_bias": TokenSampling(
        bias_ids=i32_column(range(10, 200)), bias_values=f32_column(0.02 * i for i in range(190)), top_p=0.9
    ),
    "penalties": TokenSampling(presence_penalty=0.7, frequency_penalty=0.4, temperature=0.7),
    "all penalties": TokenSampling(
        presence_penalty=-0.3, frequency_penalty=0.4, repetition_penalty=1.2, temperature=0.0
    ),
    "likeliest": TokenSampling(num_logprobs=5),
    "all": TokenSampling(
        num_logprobs=20, frequency_penalty=0.5, repetition_penalty=0.9, min_tokens=5, end_ids=i32_column([3, 4]),
        bias_ids=i32_column([7, 90]), bias_values=f32_column([1.5, -2.0]), temperature=0.8, top_k=30,
    ),
}  # fmt: skip


@contextmanager
def no_waits() -> Iterator[None]:
    """An operation that makes the host wait is an error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_does_not_wait() -> None:
    bench = Bench(DEVICE)
    bench.admit({slot: SAMPLINGS[name] for slot, name in enumerate(SAMPLINGS)})
    slots = np.arange(len(SAMPLINGS), dtype=np.int32)
    slots_at = torch.from_numpy(slots).long().to(DEVICE)
    lengths = np.full(slots.size, len(bench.tokens[0]))
    lengths_at = torch.from_numpy(lengths).to(DEVICE, torch.int32)
    hidden = torch.randn(slots.size, VOCAB, device=DEVICE)
    bench.kernels.sample(hidden, slots, lengths, slots_at, lengths_at)  # compiles
    with no_waits():
        draws = bench.kernels.sample(hidden, slots, lengths, slots_at, lengths_at)
    assert draws.tops[0].rows.tolist() == [4, 5]


def make_counted(num: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, EditTable, RowTable, RowTokens]:
    """Logits, contexts and tables of rows with `length` tokens of output, every seventh of which is not edited."""
    generator = torch.Generator(DEVICE).manual_seed(length)
    logits = 3 * torch.randn(num, LARGE, device=DEVICE, generator=generator)
    pages = -(-(length + 3) // PAGE_SIZE)
    page_table = torch.randperm(num * pages, device=DEVICE, generator=generator).view(num, pages).to(torch.int32)
    history = torch.randint(0, LARGE, (num * pages, PAGE_SIZE), device=DEVICE, generator=generator, dtype=torch.int32)
    history %= torch.tensor([40, 4000, LARGE], device=DEVICE)[torch.arange(num * pages, device=DEVICE) % 3][:, None]
    flags = torch.full((num,), int(Flag.COUNTED | Flag.REPETITION | Flag.LOGPROBS) | RAW.value, device=DEVICE)
    flags[::7] = int(Flag.LOGPROBS)

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num,), value, dtype=dtype, device=DEVICE)

    table = RowTable(
        temperature=column(1.0),
        top_p=column(1.0),
        min_p=column(0.0),
        repetition=column(2.0),  # whose reciprocal is exact
        top_k=column(0, torch.int32),
        flags=flags.to(torch.int32),
        num_prompt=column(3, torch.int32),
        seeds=torch.arange(num, device=DEVICE),
        seen=torch.zeros(num, -(-LARGE // 32), dtype=torch.int32, device=DEVICE),
    )
    none = torch.zeros(num, 320, device=DEVICE)
    edits = EditTable(
        presence=column(0.5),
        frequency=column(0.3),
        min_tokens=column(0, torch.int32),
        num_bias=column(0, torch.int32),
        num_ends=column(0, torch.int32),
        num_top=column(NUM_TOP, torch.int32),
        ids=none.to(torch.int32),
        values=none,
    )
    return logits.to(dtype), column(length + 3, torch.int32), edits, table, RowTokens(page_table, history)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num", "length"), [(1, 1), (300, 700), (20, 20_000)])
def test_edits_of_a_large_vocabulary(num: int, length: int, dtype: torch.dtype) -> None:
    """The values of plain torch, several times over the same workspace, and at last in a graph."""
    logits, contexts, edits, table, tokens = make_counted(num, length, dtype)
    slots = torch.arange(num, device=DEVICE)
    rows = tokens.history[tokens.page_table.long()].flatten(1)[:, 3 : 3 + length].long()
    seen = Penalties(rows, torch.full_like(slots, length), torch.zeros_like(slots), edits.presence, edits.frequency,
                     table.repetition)  # fmt: skip
    expected = logits.float().clone()
    penalties.apply_repetition(expected, seen)
    penalties.subtract_counts(expected, seen)
    expected = expected.to(dtype)
    expected[::7] = logits[::7]
    close = 2e-6 if dtype == torch.float32 else 2**-8
    kernels = SamplingKernels(LARGE, num, DEVICE)
    editing = EditKernels(kernels, tokens.history.numel(), DEVICE)

    def draw(edited: Tensor) -> tuple[Tensor, ...]:
        args = (edited, slots, contexts, table, edits, tokens)
        table.seen.zero_()  # of the draw before
        tops = editing.edit(*args)
        drawn = kernels.draw(edited, slots, contexts, table)
        editing.restore(*args, drawn)
        return *drawn, *tops

    results = []
    for _ in range(3):
        edited = logits.clone()
        results.append(draw(edited))
        torch.testing.assert_close(edited, expected, rtol=close, atol=close)
        assert not editing._counts.any()
    in_graph, graph = logits.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = draw(in_graph)
    for _ in range(2):
        in_graph.copy_(logits)
        graph.replay()
        for got, eager in zip(replayed, results[0], strict=True):
            assert torch.equal(got[1::7], eager[1::7])
    token_ids, logprobs, top_ids, top_values = results[0]
    raw = distribution(logits)
    of_reference = select_logprobs(raw, token_ids, np.full(len(token_ids), NUM_TOP, np.int32))
    torch.testing.assert_close(logprobs, of_reference.chosen, atol=1e-4, rtol=1e-5)
    for row in range(num):
        if row % 7:
            assert torch.equal(top_ids[row], of_reference.top_ids[row]) or dtype == torch.bfloat16  # ties at the end
            torch.testing.assert_close(top_values[row], of_reference.top[row], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_seeded_samples_are_alike_on_cpu_and_gpu(name: str) -> None:
    """On the GPU decoding steps are replayed. Where the tokens are the same, so are the likeliest ones."""
    folder = resolve_model("demo")
    received = []
    for engine in (cpu_engine(folder), WatchedEngine(folder, "float32", grouped=False)):
        received.append(engine.run([[40, 50, 60]], n=16, max_tokens=32, sampling=SAMPLINGS[name])[0].samples)
        if isinstance(engine, WatchedEngine):
            assert engine.watch.num_replays >= 12
    pairs = [*zip(*received, strict=True)]
    same = [pair for pair in pairs if pair[0].token_ids == pair[1].token_ids]
    assert len(same) >= 14, f"{len(same)} of 16 samples agree"
    tops = [top for pair in same for top in zip(pair[0].top_ids, pair[1].top_ids, strict=True)]
    assert sum(ours == theirs for ours, theirs in tops) >= 0.97 * len(tops)  # rounding swaps two now and then
    for ours, theirs in same:
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


def cpu_engine(folder: Path) -> Engine:
    return Engine(folder, max_seqs=32, max_tokens=512, num_tokens=16384)


@pytest.mark.parametrize("name", ["min_tokens", "all penalties", "all"])
def test_graphs_draw_what_eager_steps_draw(tmp_path: Path, name: str) -> None:
    """The same kernels draw; in graphs, they also draw for padding."""
    folder = make_model(tmp_path, "llama")
    samples = []
    for graphs in (True, False):
        engine = WatchedEngine(folder, "float32", grouped=False, graphs=graphs)
        prompts = [[1, 2, 3 + i] for i in range(6)]
        received = engine.run(prompts, n=2, max_tokens=24, sampling=SAMPLINGS[name])
        samples.append([sample.token_ids for each in received for sample in each.samples])
        assert (engine.watch.num_replays > 0) == graphs
    same = sum(a == b for a, b in zip(*samples, strict=True))
    assert same >= 10, f"{same} of 12 samples agree"
