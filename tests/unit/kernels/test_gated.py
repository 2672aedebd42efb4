"""The gated product in one kernel equals the product and its gate, and is used where it was the fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from toka_async.checkpoint.spec import ACTIVATIONS
from toka_async.kernels import gated
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import GatedProducts, Tile, _gated_product
from toka_async.kernels.trial import SUSTAINED, Way
from toka_async.model.ops import TorchOps

SMALL = Tile(rows=16, columns=16, depth=16, num_stages=2, num_warps=4)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Clock:
    """Each call takes what `takes` says of the way that it went."""

    def __init__(self) -> None:
        self.went: list[str] = []
        self.takes = {"separately": 10.0, "fused": 5.0}

    def __call__(self, call: Callable[[], None], num_calls: int) -> float:
        self.went.clear()
        call()
        return num_calls * self.takes[self.went[-1] if self.went else "fused"]


def normal(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def tuned(
    clock: Clock,
    weight: Tensor,
    activation: str = "silu",
    sizes: tuple[int, ...] = (4, 80),
    num_programs: int = 3,
    fewest: int = 1,
    tiles: Sequence[Tile] = (SMALL,),
) -> GatedProducts:
    gates = GatedProducts(clock, num_programs, tiles, fewest)

    def separately(x: Tensor, weight: Tensor) -> Tensor:
        clock.went.append("separately")
        return TorchOps().gated_linear(x, weight, None, activation)

    gates.tune([weight], activation, sizes, separately)
    return gates


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "inner", "hidden"), [(1, 16, 16), (16, 32, 48), (37, 56, 40), (80, 24, 64), (300, 24, 16)]
)
def test_it_equals_the_product_and_its_gate(
    device: torch.device,
    num_rows: int,
    inner: int,
    hidden: int,
    dtype: torch.dtype,
    activation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole tiles and parts of them; fewer programs than tiles, and more; groups of rows, the last one in part."""
    x, weight = normal(device, dtype, num_rows, hidden), normal(device, dtype, 2 * inner, hidden) / hidden**0.5
    monkeypatch.setattr(gated, "fastest", lambda ways, *_, **__: len(ways) - 1)  # which would compute it many times
    output = tuned(Clock(), weight, activation, (300,)).compute(x, weight, activation)
    assert output is not None
    assert output.dtype == dtype
    exact = TorchOps().gated_linear(x.float(), weight.float(), None, activation)
    torch.testing.assert_close(output.float(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_what_is_faster_separately_is_left() -> None:
    clock, weight = Clock(), normal(torch.device("cpu"), torch.float16, 32, 16)
    clock.takes["fused"] = 10
    gates = tuned(clock, weight)
    assert gates.compute(normal(weight.device, weight.dtype, 3, 16), weight, "silu") is None
    assert gates.ranges() == []


def test_only_what_was_tuned_is_computed() -> None:
    weight = normal(torch.device("cpu"), torch.float16, 32, 16)
    gates = tuned(Clock(), weight)
    assert gates.ranges() == [(1, 80)]
    x = normal(weight.device, weight.dtype, 90, 16)
    assert gates.compute(x[:80], weight, "silu") is not None
    assert gates.compute(x, weight, "silu") is None  # too many rows
    assert gates.compute(x[:0], weight, "silu") is None
    assert gates.compute(x[:3], weight, "gelu") is None
    assert gates.compute(x[:3], weight[:16], "silu") is None
    assert gates.compute(x.view(-1)[1 : 1 + 48].view(3, 16), weight, "silu") is None  # at an odd address
    assert gates.compute(x.T.contiguous().T[:16], weight, "silu") is None  # not contiguous


def test_rows_that_cannot_be_copied_are_not_tuned() -> None:
    """Of nine values of two bytes."""
    weight = normal(torch.device("cpu"), torch.float16, 32, 9)
    gates = tuned(Clock(), weight)
    assert gates.ranges() == []
    assert gates.compute(normal(weight.device, weight.dtype, 3, 9), weight, "silu") is None


def test_fused_ops_use_it_without_a_bias(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, ran, run = normal(device, torch.float16, 32, 16), list[int](), GatedProducts._run

    def counted(gates: GatedProducts, activation: str, tile: Tile, *operands: Tensor) -> None:
        ran.append(len(operands[0]))
        run(gates, activation, tile, *operands)

    x, bias = normal(device, torch.float16, 3, 16), normal(device, torch.float16, 32)
    ops = FusedOps(gates=tuned(Clock(), weight))
    monkeypatch.setattr(GatedProducts, "_run", counted)
    for each in (None, bias):
        exact = TorchOps().gated_linear(x.float(), weight.float(), None if each is None else each.float(), "silu")
        torch.testing.assert_close(ops.gated_linear(x, weight, each, "silu").float(), exact, atol=4e-2, rtol=4e-3)
        assert ran == [3]


def test_fused_ops_do_without_it(device: torch.device) -> None:
    clock, weight = Clock(), normal(device, torch.float16, 32, 16)
    clock.takes["fused"] = 11
    x, ops = normal(device, torch.float16, 3, 16), FusedOps(gates=tuned(clock, weight))
    exact = TorchOps().gated_linear(x.float(), weight.float(), None, "silu")
    torch.testing.assert_close(ops.gated_linear(x, weight, None, "silu").float(), exact, atol=4e-2, rtol=4e-3)


def test_one_kernel_for_any_number_of_rows() -> None:
    """Triton would build one for 1, one for multiples of 16, and one for the others."""
    if torch.cuda.is_available():
        excluded = [param.name for param in _gated_product.params if param.do_not_specialize]
    else:  # the interpreter's
        excluded = _gated_product.kwargs["do_not_specialize"]
    assert excluded == ["num_rows"]


def test_how_the_ways_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours wins when it is alike; the most rows take longer turns; a choice for many more rows is timed in between."""
    timed: list[tuple[list[int], float, float]] = []

    def fastest(ways: Sequence[Way], *args: Any, gain: float, sustained: float) -> int:
        timed.append(([len(x) for x, _ in args[1]], gain, sustained))
        return len(ways) - 1

    monkeypatch.setattr(gated, "fastest", fastest)
    tuned(Clock(), normal(torch.device("cpu"), torch.float16, 32, 16), sizes=(4, 300))
    assert timed == [([4], 1.0, SUSTAINED), ([300, 152], 1.0, 200.0)]


def test_few_rows_are_computed_separately() -> None:
    weight = normal(torch.device("cpu"), torch.float16, 32, 16)
    gates = tuned(Clock(), weight, fewest=3)
    assert gates.compute(normal(weight.device, weight.dtype, 2, 16), weight, "silu") is None
    assert gates.compute(normal(weight.device, weight.dtype, 3, 16), weight, "silu") is not None


def test_by_default_from_64_rows_on() -> None:
    weight = normal(torch.device("cpu"), torch.float16, 32, 16)
    gates = tuned(Clock(), weight, fewest=GatedProducts(Clock(), 3)._fewest)
    x = normal(weight.device, weight.dtype, 64, 16)
    assert gates.ranges() == [(64, 80)]
    assert gates.compute(x[:63], weight, "silu") is None
    assert gates.compute(x, weight, "silu") is not None
    assert tuned(Clock(), weight, sizes=(4, 63), fewest=64).ranges() == []


def test_ranges_are_of_rows() -> None:
    weight, won = normal(torch.device("cpu"), torch.float16, 32, 16), {4, 40, 41}

    def clock(call: Callable[[], None], num_calls: int) -> float:
        went.clear()
        call()
        return num_calls * (10.0 if went else 5.0 if now[0] in won else 20.0)

    now, went = [0], list[int]()

    def separately(x: Tensor, weight: Tensor) -> Tensor:
        now[0] = len(x)
        went.append(1)
        return x @ weight.T

    gates = GatedProducts(clock, 3, (SMALL,), fewest=2)
    gates.tune([weight], "silu", [4, 20, 40, 41, 200], separately)
    assert gates.ranges() == [(2, 4), (21, 41)]  # and large ones are left, as the largest is


def test_no_smaller_step_needs_more_memory_than_the_largest() -> None:
    """Separately, a step takes three times the memory: it is not done for more than a third of the most rows."""
    weight, went = normal(torch.device("cpu"), torch.float16, 32, 16), list[int]()

    def clock(call: Callable[[], None], num_calls: int) -> float:
        went.clear()
        call()
        return num_calls * (10.0 if not went or went[-1] < 80 else 20.0)  # of 80 rows, ours alone is faster

    def separately(x: Tensor, weight: Tensor) -> Tensor:
        went.append(len(x))
        return x @ weight.T

    gates = GatedProducts(clock, 3, (SMALL,), fewest=1)
    gates.tune([weight], "silu", [10, 20, 40, 80], separately)
    assert gates.ranges() == [(21, 80)]


def test_a_tile_that_the_chip_has_no_room_for_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run, weight = GatedProducts._run, normal(torch.device("cpu"), torch.float16, 32, 16)

    def limited(gates: GatedProducts, activation: str, tile: Tile, *operands: Tensor) -> None:
        if tile is SMALL:
            raise OutOfResources(180_000, 101_376, "shared memory")
        run(gates, activation, tile, *operands)

    monkeypatch.setattr(GatedProducts, "_run", limited)
    assert tuned(Clock(), weight).ranges() == []
    assert len(caplog.messages) == 1
    assert "tiles of 16 x 16 are not used here: out of resource: shared memory" in caplog.text
    smaller = Tile(rows=16, columns=16, depth=16, num_stages=1, num_warps=4)
    assert tuned(Clock(), weight, tiles=(SMALL, smaller)).ranges() == [(1, 80)]


def test_another_process_adopts_what_was_chosen(device: torch.device) -> None:
    weight, clock = normal(device, torch.float16, 32, 16), Clock()
    chosen = tuned(clock, weight).chosen(weight, "silu")
    assert chosen == [SMALL, SMALL]
    gates = GatedProducts(clock, 3, (SMALL,), fewest=1)
    assert gates.chosen(weight, "silu") is None
    assert gates.adopt(weight, "silu", [4, 80], [None, SMALL])
    assert gates.ranges() == [(5, 80)]
    x = normal(device, torch.float16, 5, 16)
    output = gates.compute(x, weight, "silu")
    assert output is not None
    exact = TorchOps().gated_linear(x.float(), weight.float(), None, "silu")
    torch.testing.assert_close(output.float(), exact, atol=4e-2, rtol=4e-3)
    assert gates.compute(x[:4], weight, "silu") is None


def test_adopted_too_no_smaller_step_needs_more_memory_than_the_largest() -> None:
    """Wherever the choices come from."""
    weight = normal(torch.device("cpu"), torch.float16, 32, 16)
    gates = GatedProducts(Clock(), 3, (SMALL,), fewest=1)
    assert gates.adopt(weight, "silu", [10, 20, 40, 80], [None, None, None, SMALL])
    assert gates.ranges() == [(21, 80)]
    assert gates.adopt(weight, "silu", [10, 20, 40, 80], [SMALL, None, None, None])
    assert gates.ranges() == [(1, 10)]


def test_tiles_that_are_not_built_here_are_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(torch.device("cpu"), torch.float16, 32, 16)
    gates = GatedProducts(Clock(), 3, (SMALL,), fewest=1)
    unknown = Tile(rows=16, columns=16, depth=16, num_stages=1, num_warps=4)
    assert not gates.adopt(weight, "silu", [4, 80], [SMALL, unknown])
    assert not gates.adopt(weight, "silu", [4, 80], [SMALL])
    odd = normal(torch.device("cpu"), torch.float16, 32, 9)
    assert not gates.adopt(odd, "silu", [4, 80], [SMALL, None])
    monkeypatch.setattr(gated, "_is_built", lambda *_: False)
    assert not gates.adopt(weight, "silu", [4, 80], [SMALL, None])
    assert gates.ranges() == []
