"""Which of several ways to compute a product is the fastest on this chip, at some numbers of rows.

Ways are timed as steps use them: with the weights of one layer after the other, and long ones in turns that last, as a
chip that is out of power slows down. Knows neither libraries nor kernels.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Generic, TypeVar

import torch
from torch import Tensor

# Milliseconds that so many calls take on the device.
Clock = Callable[[Callable[[], None], int], float]
# Computes from x [t, k] and a weight [n, k] what belongs into an output, if not into another of its own.
Way = Callable[[Tensor, Tensor, Tensor], object]

GAIN = 0.985  # of the usual way's time: what is closer is the usual way's
_FINALISTS = 3
_ROUNDS = 3
_LEAST_MILLISECONDS = 0.5  # of a round
_LONG = 1.0  # milliseconds of a product after which the chip may have to slow down
SUSTAINED = 12.0  # milliseconds of a round of such products: what is fastest at full speed is not always so after it
_MOST_SHORT = 8  # calls of a round
_FAR = 128  # rows between sizes that are not alike,
_MANY = 4096  # unless there are so many
_HEAD_START = 100_000  # cycles of the device for each of a short round's calls, in which the host makes it

T = TypeVar("T")


@dataclass(slots=True)
class ByRows(Generic[T]):
    """For up to sizes[i] rows, more than sizes[i - 1], the i-th choice."""

    sizes: list[int]
    choices: list[T]

    def of(self, num_rows: int) -> T | None:
        """None for no rows, and for more than there are choices for."""
        return self.choices[bisect_left(self.sizes, num_rows)] if 0 < num_rows <= self.sizes[-1] else None


def rows_to_time(size: int, before: int) -> list[int]:
    """Numbers of rows to choose by for more rows than `before`, up to `size`."""
    return [size, (size + before) // 2] if size - before >= _FAR and size <= _MANY else [size]


def fastest(
    ways: Sequence[Way],
    weights: Sequence[Tensor],
    operands: Sequence[tuple[Tensor, Tensor]],
    clock: Clock,
    gain: float = GAIN,
    sustained: float = SUSTAINED,
) -> int:
    """The index of the fastest way; 0, the usual one, unless another takes less than `gain` of its time.

    operands: x and output at each number of rows that the choice is for. All others are timed once, then the best of
    them and the usual one in turn, as clocks drift. sustained: milliseconds of a turn of a long product. In short turns
    all run at the clock that their power admits together; only after some 0.1 s each has a clock of its own.
    """

    def milliseconds(index: int, num_calls: int) -> float:
        layers = cycle(weights)

        def call(x: Tensor, output: Tensor) -> None:
            ways[index](x, next(layers), output)

        return sum(clock(partial(call, *each), num_calls) for each in operands)

    if len(ways) == 1:
        return 0
    once = {index: milliseconds(index, 1) for index in range(1, len(ways))}
    finalists = [0, *sorted(once, key=once.__getitem__)[:_FINALISTS]]
    milliseconds(0, 1)  # what it does at first use does not count
    num_calls = _calls_of_a_round(min(once.values()) / len(operands), sustained)
    rounds = [[milliseconds(index, num_calls) for index in finalists] for _ in range(_ROUNDS)]
    medians = [sorted(column)[_ROUNDS // 2] for column in zip(*rounds, strict=True)]
    best = min(range(1, len(finalists)), key=medians.__getitem__)
    return finalists[best] if medians[best] < gain * medians[0] else 0


def _calls_of_a_round(milliseconds: float, sustained: float) -> int:
    """Of products that take so long each."""
    if milliseconds >= _LONG:
        return math.ceil(sustained / milliseconds)
    return max(1, min(_MOST_SHORT, math.ceil(_LEAST_MILLISECONDS / max(milliseconds, 1e-6))))


def event_clock(call: Callable[[], None], num_calls: int) -> float:
    """Milliseconds of the calls, by events on the current stream; the host's time to make them does not count."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_HEAD_START * min(num_calls, _MOST_SHORT))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def tuned_sizes(graph_sizes: Sequence[int], most: int) -> list[int]:
    """Rows to tune for: those of graphs, and two sizes for each doubling after them, up to `most`."""
    sizes = [size for size in graph_sizes if size <= most] or [1]
    step = 1
    while sizes[-1] < most:
        while 4 * step <= sizes[-1]:
            step *= 2
        sizes.append(min(most, (sizes[-1] // step + 1) * step))
    return sizes
