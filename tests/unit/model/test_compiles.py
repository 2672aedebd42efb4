"""The count of what is compiled."""

from collections.abc import Iterator

import pytest

pytest.importorskip("triton")

from triton import knobs

from toka_async.model.compiles import CompileCounter


@pytest.fixture(autouse=True)
def _hook_as_before() -> Iterator[None]:
    before = knobs.runtime.jit_post_compile_hook
    yield
    knobs.runtime.jit_post_compile_hook = before


def test_kernels_are_counted_from_its_watching_on() -> None:
    counter = CompileCounter()
    counter.watch()
    assert counter.count() == 0
    for _ in range(3):
        knobs.runtime.jit_post_compile_hook(key="a", repr="b", fn=None, compile={}, is_manual_warmup=False)
    assert counter.count() == 3
    counter.reset()
    knobs.runtime.jit_post_compile_hook(key="a")
    assert counter.count() == 1


def test_the_newest_counts() -> None:
    first, second = CompileCounter(), CompileCounter()
    first.watch()
    second.watch()
    knobs.runtime.jit_post_compile_hook(key="a")
    assert (first.count(), second.count()) == (0, 1)
