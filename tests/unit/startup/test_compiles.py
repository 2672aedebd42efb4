"""The count of what is compiled."""

from collections.abc import Iterator

import pytest

pytest.importorskip("triton")

from triton import knobs

from toka_async.startup import compiles
from toka_async.startup.compiles import CompileCounter


@pytest.fixture(autouse=True)
def _hook_as_before() -> Iterator[None]:
    before = knobs.runtime.jit_post_compile_hook
    yield
    knobs.runtime.jit_post_compile_hook = before


def test_kernels_and_graphs_are_counted_from_its_making_on(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [5]
    monkeypatch.setattr(compiles, "num_compiles", lambda: graphs[0])
    counter = CompileCounter()
    assert counter.count() == 0
    for _ in range(3):
        knobs.runtime.jit_post_compile_hook(key="a", repr="b", fn=None, compile={}, is_manual_warmup=False)
    assert counter.count() == 3
    graphs[0] += 2
    assert counter.count() == 5


def test_the_newest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiles, "num_compiles", lambda: 0)
    first, second = CompileCounter(), CompileCounter()
    knobs.runtime.jit_post_compile_hook(key="a")
    assert (first.count(), second.count()) == (0, 1)


def test_calls_that_found_no_graph_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiles, "num_compiles", lambda: 0)
    num_eager = [0]
    counter = CompileCounter(lambda: num_eager[0])
    assert counter.count() == 0
    num_eager[0] += 2
    assert counter.count() == 2
