from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drivers.step_checker import StepChecker
from tests.fakes.graphs import FakeGraphs
from tests.fakes.model import FakeAttention, FakeCache, FakeModel
from toka_async.arrays import EMPTY
from toka_async.attention.build import BuiltAttention
from toka_async.attention.kv_cache import make_cache
from toka_async.attention.reference import ReferenceAttention
from toka_async.checkpoint.limits import RankLimits
from toka_async.checkpoint.spec import ModelSpec, read_spec
from toka_async.messages import Ready, Step, StepDone
from toka_async.model.decoder import Decoder
from toka_async.model.weights import build_decoder, random_weights
from toka_async.runner.graphs import list_graph_sizes
from toka_async.runner.runner import Runner, SamplingSetup
from toka_async.startup.cache_size import count_largest_step_pages
from toka_async.startup.progress import StartupProgress
from toka_async.startup.warmup import Load, list_cpu_loads, list_gpu_loads, make_largest_load, warm_up

CPU = torch.device("cpu")


class CheckingRunner:
    """Checks steps and computes nothing."""

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.checker = StepChecker(ready)

    def run(self, step: Step) -> StepDone:
        self.checker.check(step)
        return StepDone(step_id=step.step_id, token_ids=EMPTY)


def checked(ready: Ready, loads: list[Load]) -> StepChecker:
    runner = CheckingRunner(ready)
    for load in loads:
        load(cast(Runner, runner))
        assert runner.checker.is_empty
    return runner.checker


@st.composite
def readys(draw: st.DrawFn, largest: int = 40) -> Ready:
    """As a rank would make them: a step has a token for every row, a context fits the cache."""
    max_seqs, page_size = draw(st.integers(1, largest)), draw(st.sampled_from([1, 2, 7, 16, 64]))
    num_pages = draw(st.integers(1, 4 * largest))
    return Ready(
        num_pages=num_pages,
        page_size=page_size,
        max_seqs=max_seqs,
        max_context=min(draw(st.integers(1, 300)), num_pages * page_size),
        vocab_size=20,
        max_tokens=draw(st.integers(max_seqs, max_seqs + 200)),
    )


@settings(max_examples=80, deadline=None)
@given(ready=readys())
def test_loads_of_a_gpu_fit(ready: Ready) -> None:
    checked(ready, list_gpu_loads(ready))


@settings(max_examples=100, deadline=None)
@given(ready=readys())
def test_loads_of_a_cpu_fit(ready: Ready) -> None:
    checked(ready, list_cpu_loads(ready))


@settings(max_examples=150, deadline=None)
@given(ready=readys(), context=st.integers(1, 300))
def test_the_largest_load_fits_the_pages_set_aside_for_it(ready: Ready, context: int) -> None:
    """Of as many rows as there may be, with as many tokens as there may be, or as they can have."""
    limits = RankLimits(ready.max_seqs, ready.max_tokens, context)
    ready = Ready(
        num_pages=count_largest_step_pages(limits, ready.page_size),
        page_size=ready.page_size,
        max_seqs=limits.max_seqs,
        max_context=context,
        vocab_size=20,
        max_tokens=limits.max_tokens,
    )
    checker = checked(ready, [make_largest_load(ready)])
    assert checker.rows[0] == (0, ready.max_seqs)
    most = ready.max_seqs * max(context - 2, 1)
    assert checker.tokens[0] == min(ready.max_tokens, most)
    if context > 1:
        assert checker.rows[1] == (ready.max_seqs, 0)


def test_loads_of_a_gpu_are_of_all_kinds() -> None:
    ready = Ready(num_pages=2000, page_size=4, max_seqs=80, max_context=400, vocab_size=20, max_tokens=2000)
    checker = checked(ready, list_gpu_loads(ready))
    assert {(n, 0) for n in (1, 2, 3, 17, 64, 80)} | {(0, n) for n in (1, 2, 3, 17, 64, 80)} <= {*checker.rows}
    assert {(n, 1) for n in (1, 2, 3, 17, 64)} <= {*checker.rows}  # chunks beside decoding rows
    assert {*checker.groups} == {(0, 2, 1), (0, 64, 4), (0, 80, 32)}
    assert max(checker.tokens) >= 80 * 8
    assert {1, 395 // 16, 395 // 2, 395} <= {*checker.tokens}
    assert 17 * 2 in checker.tokens  # after shared pages: rows of many keys


ODD = [
    Ready(num_pages=1, page_size=1, max_seqs=1, max_context=1, vocab_size=261, max_tokens=1),
    Ready(num_pages=1, page_size=16, max_seqs=3, max_context=2, vocab_size=261, max_tokens=3),
    Ready(num_pages=3, page_size=1, max_seqs=2, max_context=3, vocab_size=261, max_tokens=2),
    Ready(num_pages=2, page_size=5, max_seqs=1, max_context=10, vocab_size=261, max_tokens=4),
    Ready(num_pages=9, page_size=3, max_seqs=20, max_context=27, vocab_size=261, max_tokens=20),
    Ready(num_pages=60, page_size=16, max_seqs=4, max_context=512, vocab_size=261, max_tokens=64),
    Ready(num_pages=50, page_size=4, max_seqs=8, max_context=20, vocab_size=261, max_tokens=200),
]


@pytest.fixture(scope="module")
def spec(model_dir: Path) -> ModelSpec:
    return read_spec(model_dir)


@pytest.fixture(scope="module")
def decoder(spec: ModelSpec) -> Iterator[Decoder]:
    decoder = build_decoder(spec, torch.float32, CPU)
    random_weights(decoder, seed=0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield decoder
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("ready", ODD, ids=lambda ready: f"{ready.num_pages}x{ready.page_size}")
@pytest.mark.parametrize(
    "loads", [list_gpu_loads, list_cpu_loads, lambda ready: [make_largest_load(ready)]], ids=["gpu", "cpu", "most"]
)
def test_loads_are_computed_within_odd_limits(
    ready: Ready, loads: Callable[[Ready], list[Load]], decoder: Decoder, spec: ModelSpec
) -> None:
    """With a model: its cache has no page too many, but for the padding's."""
    if loads not in (list_gpu_loads, list_cpu_loads):
        limits = RankLimits(ready.max_seqs, ready.max_tokens, ready.max_context)
        ready = msgspec.structs.replace(ready, num_pages=count_largest_step_pages(limits, ready.page_size))
    cache = make_cache(spec, ready.num_pages + 1, ready.page_size, torch.float32, CPU)
    attention = ReferenceAttention(cache, spec.attention.num_heads, spec.windows)
    runner = Runner(ready, CPU, decoder, cache, BuiltAttention(attention))
    for load in loads(ready):
        load(runner)
        assert not runner._rows.order.size


def runner_with_kernels(ready: Ready) -> Runner:
    cache, attention = FakeCache(ready.num_pages + 1, ready.page_size), FakeAttention()
    model = FakeModel(ready.vocab_size, cache)
    return Runner(ready, CPU, model, cache, BuiltAttention(attention, attention), SamplingSetup(kernels=True))


@pytest.mark.parametrize("ready", ODD, ids=lambda ready: f"{ready.num_pages}x{ready.page_size}")
@pytest.mark.parametrize("grouped", [False, True])
def test_warm_up_captures_and_replays(fake_graphs: FakeGraphs, ready: Ready, grouped: bool) -> None:
    runner, sizes = runner_with_kernels(ready), list_graph_sizes(min(4, ready.max_seqs))
    runner._compiles._num_kernels = 7  # all before it is warm

    def capture() -> None:
        assert runner.decode is not None
        list(runner.decode.capture(sizes, int(grouped)))
        assert not fake_graphs.num_replays()

    stages = StartupProgress(io.StringIO(), shown=False)
    warm_up(runner, stages, capture=capture)
    assert len(fake_graphs.list_steps()) == len(sizes) * (1 + grouped)
    assert all(graph.num_replays for graph in fake_graphs.graphs)
    assert (fake_graphs.num_replays() > len(fake_graphs.list_steps())) == (ready.max_context > 1)
    assert [*stages.seconds] == ["warm-up", "graphs"]
    assert runner.run(Step(step_id=1)).num_compiles == 0


def test_large_steps_are_not_computed_again_around_graphs(
    fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_with_kernels(ODD[-1])
    run, tokens, captured = runner.run, list[int](), list[int]()

    def note(step: Step) -> StepDone:
        tokens.append(int(np.asarray(step.chunk_lengths).max(initial=0)))
        return run(step)

    def capture() -> None:
        captured.append(len(tokens))
        assert runner.decode is not None
        list(runner.decode.capture([1], 0))

    monkeypatch.setattr(runner, "run", note)
    warm_up(runner, StartupProgress(io.StringIO(), shown=False), capture=capture)
    before, after = tokens[: captured[0]], tokens[captured[0] :]
    assert max(before) == 15
    assert 0 < max(after) < 15
    assert fake_graphs.num_replays() > 1


def test_steps_are_rehearsed_until_they_are_captured(fake_graphs: FakeGraphs) -> None:
    runner = runner_with_kernels(ODD[-1])
    assert isinstance(runner.model, FakeModel)
    rehearsed = runner.model.rehearsed

    def capture() -> None:
        assert rehearsed
        assert all(rehearsed)
        rehearsed.clear()
        assert runner.decode is not None
        list(runner.decode.capture([1], 0))
        assert rehearsed == [True, False]
        rehearsed.clear()

    warm_up(runner, StartupProgress(io.StringIO(), shown=False), capture=capture)
    assert rehearsed
    assert not any(rehearsed)
    assert fake_graphs.num_replays()


@pytest.mark.usefixtures("plain_kernels")
def test_warm_up_copies_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, copied = runner_with_kernels(ODD[-1]), []
    monkeypatch.setattr(runner.cache, "copy_pages", lambda *pages: copied.append(pages))
    warm_up(runner, StartupProgress(io.StringIO(), shown=False))
    assert copied


def test_warm_up_without_graphs(fake_graphs: FakeGraphs) -> None:
    stages = StartupProgress(io.StringIO(), shown=False)
    warm_up(runner_with_kernels(ODD[-1]), stages)
    assert [*stages.seconds] == ["warm-up"]
    assert fake_graphs.graphs == []
