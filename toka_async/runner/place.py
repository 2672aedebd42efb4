"""Where a rank stands among those that hold one model together. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Place:
    """rank: of `size` tensor ranks. device_index: its GPU, if there are any. group: the address where ranks meet.

    num_sharing: ranks of all replicas, which share the machine.
    """

    rank: int = 0
    size: int = 1
    device_index: int = 0
    group: str = ""
    num_sharing: int = 1


ALONE = Place()
