"""The experts of a layer that a rank has, and that of all tokens. Loads no Triton, which is not everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, frozen=True)
class ExpertWeights:
    """Matrices of the experts from number `first` on, and how tokens choose among all experts.

    gate_up: [own experts, 2 * inner, hidden]; down: [own experts, hidden, inner]; in E4M3 with scales in float32, of
    rows [own experts, n] or of blocks [own experts, n / BLOCK, k / BLOCK], see `GroupScales`. top_k: of a token.
    renormalizes: their shares add up to 1. loads: int64 [experts], the tokens that chose each expert; None: uncounted.
    counted: int32 [1], how many tokens of a step count, the others being padding; None: all. gate_up_bias [own experts,
    2 * inner], down_bias [own experts, hidden]: None where experts have none; of a down bias, where other ranks add it.
    """

    gate_up: Tensor
    down: Tensor
    first: int
    top_k: int
    renormalizes: bool
    activation: str
    loads: Tensor | None = None
    counted: Tensor | None = None
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(slots=True, frozen=True)
class ExpertOfAll:
    """An expert that all tokens pass through.

    compute: returns what it makes of them, [t, hidden]; it is called once. gate: [1, hidden]; the sigmoid of a token's
    product with it is the share with which the token's result is added.
    """

    compute: Callable[[], Tensor]
    gate: Tensor
