"""Chooses a part for each batch from a table of what was fastest on this chip, and delegates to it.

Knows neither how the table was measured nor what the parts do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from toka_async.attention.base import AttentionBatch, PrefixGroup

if TYPE_CHECKING:  # these need Triton, which is not everywhere
    from toka_async.attention.parts import ChunkPart, DecodePart, GraphDecodePart

MARGIN = 0.97  # times that are closer are alike


@dataclass(slots=True, frozen=True)
class Point:
    """A measured shape and the name of the part that was fastest there."""

    size: int
    tokens: int
    choice: str


@dataclass(slots=True, frozen=True)
class Table:
    """What was fastest where.

    decode: by decoding rows and their mean context. grouped: by mean rows of a group and mean tokens of its prefix.
    chunks: by tokens of all chunks and their mean context. smallest_group: rows of the smallest group and tokens of the
    shortest prefix from which on sharing pays; (0, 0): it does not.
    """

    decode: tuple[Point, ...]
    grouped: tuple[Point, ...]
    chunks: tuple[Point, ...]
    smallest_group: tuple[int, int]

    def summary(self) -> str:
        """For people: how often each part was fastest, and which groups share."""
        counts = [
            f"{name} " + ", ".join(f"{choice} {n}" for choice, n in Counter(p.choice for p in points).most_common())
            for name, points in (("decode", self.decode), ("grouped", self.grouped), ("chunks", self.chunks))
        ]
        rows, tokens = self.smallest_group
        groups = f"groups from {rows} rows and {tokens} tokens" if rows else "no groups"
        return "; ".join([*counts, groups])


def only(choice: str, smallest_group: tuple[int, int] = (0, 0)) -> Table:
    """A table of one part."""
    points = (Point(1, 1, choice),)
    return Table(points, points, points, smallest_group)


def nearest(points: Sequence[Point], size: float, tokens: float) -> str:
    """The choice at the point whose size and tokens differ by the smallest factors."""
    assert points

    def distance(point: Point) -> float:
        return abs(math.log2(max(size, 1) / point.size)) + abs(math.log2(max(tokens, 1) / point.tokens))

    return min(points, key=distance).choice


def smallest_group(saved: Mapping[tuple[int, int], float]) -> tuple[int, int]:
    """(rows, tokens) from which on every measured group is worth its merge, such that they save the most together.

    saved: by rows of a group and tokens of its prefix; 0 or less: not worth it. (0, 0): there is no such corner.
    """
    best, most = (0, 0), 0.0
    for num_rows in sorted({rows for rows, _ in saved}):
        for num_tokens in sorted({tokens for _, tokens in saved}):
            corner = [value for (rows, tokens), value in saved.items() if rows >= num_rows and tokens >= num_tokens]
            if corner and min(corner) > 0 and sum(corner) > most:
                best, most = (num_rows, num_tokens), sum(corner)
    return best


class AutoDecode:
    """`DecodePart` that delegates to the part that the table names for the batch; graphs are always `captured`'s."""

    def __init__(
        self, parts: Mapping[str, DecodePart], table: Table, page_size: int, captured: GraphDecodePart | None = None
    ) -> None:
        self.parts = dict(parts)
        self.table = table
        self.page_size = page_size
        self.captured = captured
        self.chosen = next(iter(self.parts.values()))

    def plan(self, batch: AttentionBatch, groups: tuple[PrefixGroup, ...], window: int) -> None:
        self.chosen = self.parts[self._choice(batch, groups)]
        self.chosen.plan(batch, groups, window)

    def run(self, layer: int, query: Tensor, output: Tensor) -> None:
        self.chosen.run(layer, query, output)

    def plan_graph(self, batch: AttentionBatch, grouped: bool, window: int) -> None:
        assert self.captured is not None, "no part of these can be captured"
        self.chosen = self.captured
        self.captured.plan_graph(batch, grouped, window)

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        assert self.captured is not None, "no part of these can be captured"
        self.captured.set_groups(groups)

    def _choice(self, batch: AttentionBatch, groups: tuple[PrefixGroup, ...]) -> str:
        if len(self.parts) == 1:
            return next(iter(self.parts))
        if not groups:
            context = float(batch.context_lengths[: batch.num_decode].mean())
            return nearest(self.table.decode, batch.num_decode, context)
        num_pages = sum(group.num_pages for group in groups)
        num_rows = sum(group.num_rows for group in groups)
        return nearest(self.table.grouped, num_rows / len(groups), num_pages * self.page_size / len(groups))


class AutoChunks:
    """`ChunkPart` that delegates to the part that the table names for the batch."""

    def __init__(self, parts: Mapping[str, ChunkPart], table: Table) -> None:
        self.parts = dict(parts)
        self.table = table
        self.chosen = next(iter(self.parts.values()))

    def plan(self, batch: AttentionBatch, window: int) -> None:
        self.chosen = self.parts[self._choice(batch)]
        self.chosen.plan(batch, window)

    def run(self, layer: int, query: Tensor, output: Tensor) -> None:
        self.chosen.run(layer, query, output)

    def _choice(self, batch: AttentionBatch) -> str:
        if len(self.parts) == 1:
            return next(iter(self.parts))
        num_tokens = int(batch.query_lengths[batch.num_decode :].sum())
        return nearest(self.table.chunks, num_tokens, float(batch.context_lengths[batch.num_decode :].mean()))
