"""Values of a strategy in a list, the same for the same seed."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

T = TypeVar("T")


def drawn(strategy: st.SearchStrategy[T], count: int, number: int = 1) -> list[T]:
    """So many, or a few less: no value is there twice but by chance. `number` is the seed."""
    made: list[T] = []

    @seed(number)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=HEALTH)
    @given(strategy)
    def keep(value: T) -> None:
        made.append(value)

    keep()
    return made


HEALTH = list(HealthCheck)
