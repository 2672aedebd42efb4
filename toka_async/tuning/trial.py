"""Finds which of several ways to compute a product is the fastest on this chip, at some numbers of rows.

Ways are timed as steps use them, with the weights of one layer after the other. Long ones run in turns that last, since
a chip that reaches its power limit slows down. Knows neither libraries nor kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

from torch import Tensor

from toka_async.tuning.clock import time_calls

# Milliseconds that so many calls take on the device.
CallClock = Callable[[Callable[[], None], int], float]
# Computes an output from x [t, k] and a weight [n, k], each in the form that suits, into the given tensor or one of its
# own.
Way = Callable[[Any, Any, Tensor], object]

GAIN = 0.985  # of the usual way's time: a closer one does not replace it
_FINALISTS = 3
_ROUNDS = 3
_LEAST_MILLISECONDS = 0.5  # milliseconds of a round, at least
_LONG = 1.0  # milliseconds of a product after which the chip may have to slow down
SUSTAINED = 12.0  # milliseconds of a round of such products: what is fastest at full speed is not always so after it
_MOST_SHORT = 8  # calls of a round of short products, at most
_FAR = 128  # rows: sizes that are further apart may differ in their fastest way,
_MANY = 4096  # unless both have so many


def pick_rows_to_time(size: int, before: int) -> list[int]:
    """Picks numbers of rows by which to choose for more than `before` rows, up to `size`."""
    return [size, (size + before) // 2] if size - before >= _FAR and size <= _MANY else [size]


def time_products(call: Callable[[], None], num_calls: int) -> float:
    """Measures by the device's clock, without the host's time to make the calls."""
    return time_calls(call, num_calls, head_start=min(num_calls, _MOST_SHORT))


def find_fastest(
    ways: Sequence[Way],
    weights: Sequence[Any],
    operands: Sequence[tuple[Any, Tensor]],
    clock: CallClock,
    gain: float = GAIN,
    sustained: float = SUSTAINED,
) -> int:
    """Finds the index of the fastest way; 0, the usual one, unless another takes less than `gain` of its time.

    operands: x and output at each number of rows that the choice is for. All others are timed once, then the best of
    them and the usual one in turn, as clocks drift. sustained: milliseconds of a turn of a long product. In short turns
    all share the clock that their power admits together; a way reaches its own clock only after some 0.1 s.
    """

    def time_way(index: int, num_calls: int) -> float:
        layers = cycle(weights)

        def call(x: Any, output: Tensor) -> None:
            ways[index](x, next(layers), output)

        return sum(clock(partial(call, *each), num_calls) for each in operands)

    if len(ways) == 1:
        return 0
    once = {index: time_way(index, 1) for index in range(1, len(ways))}
    finalists = [0, *sorted(once, key=once.__getitem__)[:_FINALISTS]]
    time_way(0, 1)  # the first use does not count
    num_calls = _count_calls(min(once.values()) / len(operands), sustained)
    rounds = [[time_way(index, num_calls) for index in finalists] for _ in range(_ROUNDS)]
    medians = [sorted(column)[_ROUNDS // 2] for column in zip(*rounds, strict=True)]
    best = min(range(1, len(finalists)), key=medians.__getitem__)
    return finalists[best] if medians[best] < gain * medians[0] else 0


def _count_calls(milliseconds: float, sustained: float) -> int:
    """Counts the calls in a round of a product that takes so long."""
    if milliseconds >= _LONG:
        return math.ceil(sustained / milliseconds)
    return max(1, min(_MOST_SHORT, math.ceil(_LEAST_MILLISECONDS / max(milliseconds, 1e-6))))
