"""The place of a rank among those that hold one model together. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class RankCoords:
    """rank: of `size` tensor ranks. stage: of `num_stages`. device_index: its GPU, if there are any.

    group: the address where the ranks of all stages meet. group_fd: a socket that listens there, on the rank that opens
    it; -1: there is none. num_nodes: machines that the stages are on. interface: of the network between them, on this
    machine. num_sharing: ranks of all replicas on this machine. num_micro_batches: of a step.
    """

    rank: int = 0
    size: int = 1
    stage: int = 0
    num_stages: int = 1
    device_index: int = 0
    group: str = ""
    group_fd: int = -1
    num_nodes: int = 1
    interface: str = ""
    num_sharing: int = 1
    num_micro_batches: int = 1

    @property
    def world_rank(self) -> int:
        """Its rank among those of all stages."""
        return self.stage * self.size + self.rank

    @property
    def is_last(self) -> bool:
        """Whether its stage draws tokens."""
        return self.stage == self.num_stages - 1

    def find_node(self, stage: int) -> int:
        """The machine of a stage."""
        return stage // (self.num_stages // self.num_nodes)

    @property
    def world_size(self) -> int:
        return self.num_stages * self.size


ALONE = RankCoords()
