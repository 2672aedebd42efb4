from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import GatedProducts, Tile
from toka_async.model.matrices.ops import TorchOps
from toka_async.tuning import gated_tiles
from toka_async.tuning.gated_tiles import LONGER, GatedTileChoice, list_gated_sizes
from toka_async.tuning.trial import SUSTAINED, CallClock, Way

SMALL = Tile(rows=16, columns=16, depth=16, num_stages=2, num_warps=4)
SMALLER = Tile(rows=16, columns=16, depth=16, num_stages=1, num_warps=4)
CPU = torch.device("cpu")


class Clock:
    """Each call takes what `takes` says of the way that it went."""

    def __init__(self) -> None:
        self.went: list[str] = []
        self.takes = {"separately": 10.0, "fused": 5.0}

    def __call__(self, call: Callable[[], None], num_calls: int) -> float:
        self.went.clear()
        call()
        return num_calls * self.takes[self.went[-1] if self.went else "fused"]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.float16)


def choice_of(
    clock: CallClock,
    weight: Tensor,
    sizes: Sequence[int] = (4, 80),
    separately: Callable[[Tensor, Tensor], Tensor] | None = None,
    fewest: int = 1,
    tiles: Sequence[Tile] = (SMALL,),
) -> tuple[GatedTileChoice, GatedProducts]:
    gates = GatedProducts(3, fewest)

    def usual(x: Tensor, weight: Tensor) -> Tensor:
        assert isinstance(clock, Clock)
        clock.went.append("separately")
        return TorchOps().gated_linear(x, weight, None, "silu")

    return GatedTileChoice(gates, [weight], "silu", sizes, separately or usual, 13, tiles, clock), gates


def tuned(*args: Any, **options: Any) -> GatedProducts:
    choice, gates = choice_of(*args, **options)
    choice.use(choice.measure())
    return gates


def test_what_is_faster_separately_is_left() -> None:
    clock, weight = Clock(), normal(32, 16)
    clock.takes["fused"] = 10
    gates = tuned(clock, weight)
    assert gates.compute(normal(3, 16), weight, "silu") is None
    assert gates.ranges() == []


def test_what_is_faster_in_one_kernel_is_computed_so() -> None:
    weight, x = normal(32, 16), normal(3, 16)
    gates = tuned(Clock(), weight)
    assert gates.ranges() == [(1, 80)]
    exact = TorchOps().gated_linear(x.float(), weight.float(), None, "silu")
    torch.testing.assert_close(
        FusedOps(gates=gates).gated_linear(x, weight, None, "silu").float(), exact, atol=4e-2, rtol=4e-3
    )


def test_there_may_be_nothing_to_choose() -> None:
    """Rows of nine values of two bytes, which cannot be copied; and steps of fewer rows than the kernel is for."""
    assert choice_of(Clock(), normal(32, 16))[0].is_open
    assert not choice_of(Clock(), normal(32, 9))[0].is_open
    assert not choice_of(Clock(), normal(32, 16), sizes=(4, 63), fewest=64)[0].is_open
    assert choice_of(Clock(), normal(32, 16), sizes=(4, 64), fewest=64)[0].is_open


def test_how_the_ways_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours wins when it is alike; the most rows take longer turns; a choice for many more rows is timed in between."""
    timed: list[tuple[list[int], float, float]] = []

    def fastest(ways: Sequence[Way], *args: Any, gain: float, sustained: float) -> int:
        timed.append(([len(x) for x, _ in args[1]], gain, sustained))
        return len(ways) - 1

    monkeypatch.setattr(gated_tiles, "find_fastest", fastest)
    tuned(Clock(), normal(32, 16), sizes=(4, 300))
    assert timed == [([4], 1.0, SUSTAINED), ([300, 152], 1.0, LONGER)]


def test_each_size_has_its_own_choice() -> None:
    weight, won = normal(32, 16), {4, 40, 41}
    now, went = [0], list[int]()

    def clock(call: Callable[[], None], num_calls: int) -> float:
        went.clear()
        call()
        return num_calls * (10.0 if went else 5.0 if now[0] in won else 20.0)

    def separately(x: Tensor, weight: Tensor) -> Tensor:
        now[0] = len(x)
        went.append(1)
        return x @ weight.T

    gates = tuned(clock, weight, [4, 20, 40, 41, 200], separately, fewest=2)
    assert gates.ranges() == [(2, 4), (21, 41)]  # and large ones are left, as the largest is


def test_no_smaller_step_needs_more_memory_than_the_largest() -> None:
    """Separately, a step takes three times the memory: it is not done for more than a third of the most rows."""
    choice, gates = choice_of(Clock(), normal(32, 16), [10, 20, 40, 80])
    choice.use([None, None, None, SMALL])
    assert gates.ranges() == [(21, 80)]
    choice.use([SMALL, None, None, None])
    assert gates.ranges() == [(1, 10)]


def test_a_tile_that_the_chip_has_no_room_for_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run, weight = GatedProducts.run, normal(32, 16)

    def limited(gates: GatedProducts, activation: str, tile: Tile, *operands: Tensor) -> None:
        if tile is SMALL:
            raise OutOfResources(180_000, 101_376, "shared memory")
        run(gates, activation, tile, *operands)

    monkeypatch.setattr(GatedProducts, "run", limited)
    assert tuned(Clock(), weight).ranges() == []
    assert caplog.text.count("not used here") == 1
    assert "tiles of 16 x 16 are not used here: out of resource: shared memory" in caplog.text
    assert tuned(Clock(), weight, tiles=(SMALL, SMALLER)).ranges() == [(1, 80)]


def test_another_process_takes_what_was_chosen() -> None:
    weight = normal(32, 16)
    assert choice_of(Clock(), weight)[0].measure() == [SMALL, SMALL]
    choice, gates = choice_of(Clock(), weight)
    assert choice.admits([None, SMALL])
    choice.use([None, SMALL])
    assert gates.ranges() == [(5, 80)]


def test_tiles_that_are_not_built_here_are_not_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, _ = choice_of(Clock(), normal(32, 16))
    assert not choice.admits([SMALL, SMALLER])  # which is none of those to choose from
    assert not choice.admits([SMALL])

    def fail(*_: object) -> None:
        raise OutOfResources(180_000, 101_376, "shared memory")

    monkeypatch.setattr(GatedProducts, "run", fail)
    assert not choice.admits([SMALL, None])
    assert choice.admits([None, None])


def test_what_the_fastest_tiles_depend_on() -> None:
    assert choice_of(Clock(), normal(32, 16), sizes=[80, 4])[0].describe() == {
        "shape": [32, 16],
        "dtype": "torch.float16",
        "weights": 1,
        "sizes": [4, 80],
        "activation": "silu",
        "library": 13,
    }


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (128, [128]), (300, [128, 256, 300]), (9000, [128, 256, 512, 1024, 2048, 4096, 9000])],
    ids=str,
)
def test_sizes(most: int, sizes: list[int]) -> None:
    assert list_gated_sizes(most) == sizes
