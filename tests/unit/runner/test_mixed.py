"""Steps with chunks of prompts begun from graphs, with CUDA's part of these played on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.cases.models import make_checkpoint
from tests.drivers.rows import VOCAB, Driver, Request, Row
from tests.drivers.thread_ranks import run_ranks
from tests.fakes.graphs import FakeGraphs
from tests.fakes.model import FakeAttention, FakeCache, FakeModel
from toka_async.arrays import as_f32, as_i32
from toka_async.attention.base import PrefixGroup
from toka_async.attention.build import BuiltAttention
from toka_async.attention.kv_cache import make_cache
from toka_async.attention.paged import PagedAttention
from toka_async.attention.reference import ReferenceAttention
from toka_async.attention.states.build import add_graph_states, add_states, build_states
from toka_async.checkpoint.spec import read_spec
from toka_async.messages import Ready, StepDone, TokenSampling
from toka_async.model.comm import Comm
from toka_async.model.weights import build_decoder, random_weights
from toka_async.runner.mixed import list_mixed_sizes
from toka_async.runner.runner import Runner, SamplingSetup
from toka_async.startup.synthetic import SyntheticRows

GREEDY = TokenSampling(temperature=0)
SLOW = TokenSampling(temperature=0.9, frequency_penalty=1.5)
SCRATCH = 200  # the page after a driver's


def capture(driver: Driver, sizes: list[int]) -> None:
    for stage in driver.stages:
        assert stage.mixed is not None
        list(stage.mixed.capture(sizes, grouped=False))


def start(driver: Driver, length: int, sampling: TokenSampling = GREEDY) -> Row:
    row = driver.start(Request([*range(length)], sampling), seed=length)
    assert row is not None
    return row


@pytest.mark.parametrize("most", [1, 15, 16, 17, 64, 100, 512, 700, 4096])
def test_sizes_leave_little_padding(most: int) -> None:
    sizes = list_mixed_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for num_tokens in range(1, most + 1):
        size = next(size for size in sizes if size >= num_tokens)
        assert size - num_tokens < max(64, num_tokens / 8)
    assert len(sizes) <= 36


@pytest.mark.usefixtures("fake_graphs")
def test_what_comes_before_a_capture_is_rehearsed() -> None:
    driver = Driver(4, use_kernels=True)
    (stage,) = driver.stages
    assert isinstance(stage.model, FakeModel)
    capture(driver, [4, 8])
    assert stage.model.rehearsed == [True, False] * 2


def test_chunks_beside_decoding_rows_are_replayed(fake_graphs: FakeGraphs) -> None:
    driver = Driver(4, use_kernels=True)
    capture(driver, [4, 8, 16])
    start(driver, 9)
    for num_steps, lengths in enumerate(([4], [5], [], []), 1):
        driver.step(lengths)  # compares the tokens
        assert fake_graphs.num_replays("mixed") == num_steps
    start(driver, 13, SLOW)
    start(driver, 2)
    driver.step([13, 2])  # and a decoding row: 16 tokens
    assert fake_graphs.num_replays("mixed") == 5
    assert [graph.num_replays for graph in fake_graphs.graphs] == [1, 1, 3]  # of 16, 8 and 4 tokens


def test_larger_steps_are_not(fake_graphs: FakeGraphs) -> None:
    driver = Driver(4, use_kernels=True)
    capture(driver, [4, 8])
    start(driver, 9)
    driver.step([9])
    assert fake_graphs.num_replays("mixed") == 0
    driver.step()
    assert fake_graphs.num_replays("mixed") == 1


def test_nothing_is_replayed_without_graphs(fake_graphs: FakeGraphs) -> None:
    driver = Driver(4, use_kernels=True)
    start(driver, 5)
    driver.step([5])
    assert fake_graphs.num_replays("mixed") == 0


def test_larger_ones_may_be_captured_later(fake_graphs: FakeGraphs) -> None:
    driver = Driver(4, use_kernels=True)
    for sizes in ([4], [4, 16]):
        capture(driver, sizes)
    start(driver, 13)
    driver.step([13])  # compares the tokens
    assert fake_graphs.num_replays("mixed") == 1


def test_more_rows_than_attention_has_programs_for_are_not(
    fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toka_async.runner.mixed.MOST_ROWS", 2)
    driver = Driver(4, use_kernels=True)
    capture(driver, [16])
    rows = [start(driver, length) for length in (3, 4, 5)]
    driver.step([5] * 3)
    assert fake_graphs.num_replays("mixed") == 0
    driver.free(rows[0])
    driver.step()
    assert fake_graphs.num_replays("mixed") == 1


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_replay_their_parts(fake_graphs: FakeGraphs, num_stages: int) -> None:
    driver = Driver(4, use_kernels=True, num_stages=num_stages, num_parts=num_stages)
    capture(driver, [4, 8, 16])
    for length in (9, 2, 5):
        start(driver, length)
    for lengths in ([4, 2, 5], [5], [], []):
        driver.step(lengths)  # compares the tokens
    assert fake_graphs.num_replays("mixed") % num_stages == 0
    assert fake_graphs.num_replays("mixed") >= 4 * num_stages


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_rows_replay_them_alike(fake_graphs: FakeGraphs, size: int) -> None:
    def play(comm: Comm) -> None:
        driver = Driver(4, use_kernels=True, comm=comm)
        capture(driver, [4, 16])
        for length in (9, 2, 5):
            start(driver, length)
        for lengths in ([4, 2, 5], [5], []):
            driver.step(lengths)  # compares the tokens

    run_ranks(size, play)
    assert fake_graphs.num_replays("mixed") == 3 * size


def test_padding_writes_no_page_of_a_row(fake_graphs: FakeGraphs) -> None:
    driver = Driver(2, use_kernels=True)
    capture(driver, [4, 8, 16])
    gone = start(driver, 7)
    rows = [start(driver, 5), start(driver, 3)]
    driver.step([7, 1])
    cache: FakeCache = driver.runner.cache  # type: ignore[assignment]
    driver.free(gone)
    before = cache.tokens[gone.pages].copy()
    driver.free_pages = driver.free_pages[: -len(gone.pages)]  # nobody else takes them
    for lengths in ([4, 1], [2], [], [], []):
        driver.step(lengths)
    assert fake_graphs.num_replays("mixed") == 6
    written = {int(page) for page in np.flatnonzero((cache.tokens >= 0).any(1))}
    assert written - {page for row in (*rows, gone) for page in row.pages} == {SCRATCH}
    assert (cache.tokens[SCRATCH] >= 0).sum() == 1
    assert (cache.tokens[gone.pages] == before).all()
    assert driver.runner._history is not None
    for row in rows:
        ids = driver.runner._history.ids[row.pages].flatten()
        assert ids[: row.computed].tolist() == row.tokens[: row.computed]


def make(mixed: bool) -> tuple[Runner, FakeAttention]:
    ready = Ready(num_pages=40, page_size=4, max_seqs=6, max_context=60, vocab_size=VOCAB, max_tokens=64)
    cache, attention = FakeCache(ready.num_pages + 1, ready.page_size), FakeAttention()
    built = BuiltAttention(attention, attention, mixed=attention if mixed else None)
    model, sampling = FakeModel(VOCAB, cache), SamplingSetup(kernels=True)
    return Runner(ready, torch.device("cpu"), model, cache, built, sampling), attention


def run(runner: Runner, *sampling: TokenSampling, num_shared: int = 0, num_grouped: int = 0) -> list[StepDone]:
    """Prompts, two steps of them and another prompt, and one more step."""
    rows = SyntheticRows(runner.ready, num_shared)
    length = num_shared * runner.ready.page_size + 3
    steps = [
        rows.make_step([length] * 3, sampling),
        rows.make_step(num_grouped=num_grouped),
        rows.make_step([length], sampling, num_grouped),
        rows.make_step(num_grouped=num_grouped),
        rows.end(),
    ]
    return [runner.run(step) for step in steps]


def test_log_probs_of_prompts(fake_graphs: FakeGraphs) -> None:
    """They need the last layer of every token, and not of padding."""
    asking = TokenSampling(num_logprobs=2, num_prompt_logprobs=3)
    replaying, plain = make(True)[0], make(False)[0]
    assert replaying.mixed is not None
    list(replaying.mixed.capture([4, 16, 32], grouped=False))
    for done, expected in zip(run(replaying, asking, GREEDY), run(plain, asking, GREEDY), strict=True):
        assert as_i32(done.token_ids).tolist() == as_i32(expected.token_ids).tolist()
        assert as_f32(done.logprobs).tolist() == as_f32(expected.logprobs).tolist()
        assert done.prompts == expected.prompts
    assert fake_graphs.num_replays("mixed") == 4


@pytest.mark.parametrize("grouped", [False, True])
def test_groups_are_set_where_graphs_can_have_any(fake_graphs: FakeGraphs, grouped: bool) -> None:
    """Rows of a group that is left out read the shared pages one by one."""
    runner, attention = make(True)
    assert runner.mixed is not None
    list(runner.mixed.capture([4, 16, 32], grouped))
    run(runner, GREEDY, num_shared=2, num_grouped=2)
    assert fake_graphs.num_replays("mixed") == 4
    group = (PrefixGroup(0, 2, 2),)
    assert attention.groups == ([(), group, group, group] if grouped else [])


def test_results_outlive_the_next_replay(fake_graphs: FakeGraphs) -> None:
    """A launched step is collected after the next one was launched, which writes the same memory."""
    replaying, plain = make(True)[0], make(False)[0]
    assert replaying.mixed is not None
    list(replaying.mixed.capture([4, 16, 32], grouped=False))
    rows = SyntheticRows(replaying.ready)
    steps = [rows.make_step([3, 5], (GREEDY,)), rows.make_step([4], (GREEDY,)), rows.make_step(), rows.make_step([2])]
    launched = [replaying.launch(step) for step in steps]
    for step, expected in zip(launched, map(plain.run, steps), strict=True):
        assert as_i32(step.collect().token_ids).tolist() == as_i32(expected.token_ids).tolist()
    assert fake_graphs.num_replays("mixed") == len(steps)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels that are interpreted need a machine without a GPU")
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_decoder_computes_the_same_tokens(
    tmp_path: Path, family: str, fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our kernels in graphs of steps with chunks and without, against plain torch without graphs."""
    from toka_async.attention import triton
    from toka_async.attention.mixed import MixedGraphAttention
    from toka_async.attention.states.triton_ops import TritonStateOps
    from toka_async.attention.triton import TritonChunks, TritonDecode

    monkeypatch.setattr(triton, "MERGED_QUERIES", 4)
    spec, cpu = read_spec(make_checkpoint(tmp_path, family)), torch.device("cpu")
    decoder = build_decoder(spec, torch.float32, cpu)
    random_weights(decoder, seed=0)
    ready = Ready(num_pages=40, page_size=4, max_seqs=6, max_context=60, vocab_size=spec.vocab_size, max_tokens=64)

    def make_runner(captured: bool) -> Runner:
        cache = make_cache(spec, ready.num_pages + 1, ready.page_size, torch.float32, cpu)
        states = build_states(spec, ready.max_seqs, 0, torch.float32, cpu, can_sleep=False)
        heads = spec.attention.num_heads
        if not captured:
            built = BuiltAttention(ReferenceAttention(cache, heads, spec.windows))
            return Runner(ready, cpu, decoder, cache, add_states(built, states) if states else built, states=states)
        parts = partial(TritonDecode, cache, heads), partial(TritonChunks, cache, heads)
        paged = PagedAttention(cache, heads, spec.windows, *parts)
        built = BuiltAttention(paged, graphs=paged, mixed=MixedGraphAttention(cache, heads, spec.windows, *parts))
        if states is not None:
            built = add_graph_states(built, TritonStateOps(states))
        return Runner(ready, cpu, decoder, cache, built, SamplingSetup(kernels=True), states=states)

    replaying, plain = make_runner(True), make_runner(False)
    assert replaying.mixed is not None
    assert replaying.decode is not None
    list(replaying.mixed.capture([16], grouped=False))
    list(replaying.decode.capture([4], 0))
    asking = TokenSampling(num_logprobs=0, num_prompt_logprobs=0)
    pairs = list(zip(run(replaying, asking, GREEDY), run(plain, asking, GREEDY), strict=True))
    assert (fake_graphs.num_replays("mixed"), fake_graphs.num_replays("step")) == (2, 2)
    for done, expected in pairs:
        assert as_i32(done.token_ids).tolist() == as_i32(expected.token_ids).tolist()
        np.testing.assert_allclose(as_f32(done.logprobs), as_f32(expected.logprobs), atol=1e-5)
        for chunk, other in zip(done.prompts, expected.prompts, strict=True):
            np.testing.assert_allclose(as_f32(chunk.logprobs), as_f32(other.logprobs), atol=1e-5)


def test_a_capture_changes_nothing_but_padding(fake_graphs: FakeGraphs) -> None:
    """Before it, rows were there that have left; their slots and pages are nobody's business any more."""
    runner, _ = make(True)
    assert runner.mixed is not None
    run(runner, GREEDY)
    tables = runner._rows.on_device
    assert runner._history is not None
    before = [tables.positions.clone(), tables.last_tokens[:-1].clone(), runner._history.ids[:-1].clone()]
    list(runner.mixed.capture([4, 16], grouped=True))
    for old, new in zip(before, [tables.positions, tables.last_tokens[:-1], runner._history.ids[:-1]], strict=True):
        assert torch.equal(old, new)
    assert len(fake_graphs.graphs) == 2
