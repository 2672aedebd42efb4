"""The place of a rank among those that hold one model together. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class RankCoords:
    """rank: of `size` tensor ranks. stage: of `num_stages`. device_index: its GPU, if there are any.

    group: the address where the ranks of all stages meet. num_sharing: ranks of all replicas. num_micro_batches: of a
    step.
    """

    rank: int = 0
    size: int = 1
    stage: int = 0
    num_stages: int = 1
    device_index: int = 0
    group: str = ""
    num_sharing: int = 1
    num_micro_batches: int = 1

    @property
    def world_rank(self) -> int:
        """Its rank among those of all stages."""
        return self.stage * self.size + self.rank

    @property
    def world_size(self) -> int:
        return self.num_stages * self.size


ALONE = RankCoords()
