"""Launches of a kernel by a short key and by Triton. Instead of being compiled it notes what is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.fakes.offline_gpus import OfflineGpu
from toka_async.kernels.launches.quick import launch_quickly


class Compiled:
    """launches: grid and arguments of each, by Triton (`run`) and by the short key."""

    function = packed_metadata = None

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []

    def launch_metadata(self, *_: object) -> None:
        pass

    def run(self, x: int, y: int, z: int, *arguments: object) -> None:
        self.launches.append((x, y, z, *arguments[6:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.launches.append((*grid, *arguments))


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[None]:
    usual = driver._active
    driver.set_active(OfflineGpu(90))
    yield
    driver._active = usual


def _compute(x, y, count, size, factor, table, block: tl.constexpr, name: tl.constexpr = "a"):  # type: ignore[no-untyped-def]
    pass


class Kernel(triton.JITFunction):  # type: ignore[misc]
    def create_binder(self) -> Any:
        binder = super().create_binder()
        self.compile = lambda *_, **__: Compiled()
        return binder


def make_kernel() -> Any:
    return Kernel(_compute, do_not_specialize=["size"], do_not_specialize_on_alignment=["y"])


NUMBERS = torch.zeros(64)
TENSORS = st.builds(
    lambda dtype, first: NUMBERS.to(dtype)[first:], st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 8)
)
INTEGERS = st.sampled_from([0, 1, 2, 16, 17, -16, 2**31 - 1, 2**31, 2**40, 2**40 + 1, 2**62, 2**63, True, False])
DESCRIPTORS = st.builds(
    lambda dtype, block: TensorDescriptor.from_tensor(torch.zeros(8, 16, dtype=dtype), block),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([[4, 16], [8, 16]]),
)
ARGUMENTS = [TENSORS, TENSORS | st.none(), INTEGERS, INTEGERS, INTEGERS | st.floats(width=32), DESCRIPTORS | st.none()]
CONSTANTS = {
    "block": st.sampled_from([1, 16, 32]),
    "name": st.sampled_from(["a", "b"]),
    "num_warps": st.sampled_from([1, 4]),
}


@st.composite
def alike(draw: st.DrawFn) -> list[tuple[list[Any], dict[str, Any]]]:
    """Arguments and constants of launches, of which each differs in one from the one before."""
    arguments, constants = [draw(each) for each in ARGUMENTS], {name: draw(each) for name, each in CONSTANTS.items()}
    launches = [(arguments, constants)]
    for changed in draw(st.lists(st.sampled_from([*range(len(ARGUMENTS)), *CONSTANTS]), max_size=12)):
        if isinstance(changed, int):
            arguments = [*arguments[:changed], draw(ARGUMENTS[changed]), *arguments[changed + 1 :]]
        else:
            constants = constants | {changed: draw(CONSTANTS[changed])}
        launches.append((arguments, constants))
    return launches


@given(alike())
def test_each_launch_is_of_the_kernel_that_triton_finds(launches: list[tuple[list[Any], dict[str, Any]]]) -> None:
    kernel = make_kernel()
    quick = launch_quickly(kernel)
    for arguments, constants in launches * 2:
        found = quick[3, 2](*arguments, **constants)
        assert kernel[3, 2](*arguments, **constants) is found
        ours, tritons = found.launches[-2:]
        assert len(ours) == len(tritons) == 3 + 8
        assert all(one is other or one == other for one, other in zip(ours, tritons, strict=True))


def test_a_kernel_is_found_without_triton_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make_kernel()
    quick = launch_quickly(kernel)
    first = quick[5,](NUMBERS, None, 3, 4, 0.5, None, block=16, name="a")
    monkeypatch.setattr(kernel, "run", None)
    assert quick[6,](NUMBERS + 1, None, 5, 9, 1.5, None, block=16, name="a") is first
    assert first.launches[-1][:3] == (6, 1, 1)


def test_constants_are_given_by_name() -> None:
    with pytest.raises(AssertionError):
        launch_quickly(make_kernel())[1,](NUMBERS, None, 3, 4, 0.5, None, 16, name="a")


def test_what_the_interpreter_runs_stays_as_it_is() -> None:
    kernel = InterpretedFunction(_compute)
    assert launch_quickly(kernel) is kernel
