"""Chooses a part for each batch from a table of what was fastest on this chip, and delegates to it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from toka_async.attention.base import AttentionBatch, PrefixGroup

if TYPE_CHECKING:  # these need Triton, which is not everywhere
    from toka_async.attention.paged import DecodeKernel, GraphDecodePart, PrefillKernel

MARGIN = 0.97  # closer times count as equal


@dataclass(slots=True, frozen=True)
class MeasuredShape:
    """A measured shape and the name of the part that was fastest there."""

    size: int
    tokens: int
    choice: str


@dataclass(slots=True, frozen=True)
class ChoiceTable:
    """What was fastest at which shape.

    decode: by decoding rows and their mean context. grouped: by mean rows of a group and mean tokens of its prefix.
    chunks: by all their tokens and mean context. groups: rows and prefix tokens of the smallest groups that pay.
    """

    decode: tuple[MeasuredShape, ...]
    grouped: tuple[MeasuredShape, ...]
    chunks: tuple[MeasuredShape, ...]
    groups: tuple[tuple[int, int], ...]

    def pays(self, num_rows: int, num_tokens: int) -> bool:
        """Tells whether a group of so many rows should read a prefix of so many tokens once."""
        return any(num_rows >= rows and num_tokens >= tokens for rows, tokens in self.groups)

    def find_smallest_group(self) -> tuple[int, int]:
        """Finds the fewest rows and the fewest tokens of any group that pays; (0, 0): none does."""
        if not self.groups:
            return 0, 0
        return min(rows for rows, _ in self.groups), min(tokens for _, tokens in self.groups)

    def summarize(self) -> str:
        """Describes for people how often each part was fastest, and which groups share."""
        counts = [
            f"{name} " + ", ".join(f"{choice} {n}" for choice, n in Counter(p.choice for p in points).most_common())
            for name, points in (("decode", self.decode), ("grouped", self.grouped), ("chunks", self.chunks))
        ]
        groups = "groups of rows x tokens " + ", ".join(f"{rows}x{tokens}" for rows, tokens in self.groups)
        return "; ".join([*counts, groups if self.groups else "no groups"])


def choose_always(choice: str, groups: tuple[tuple[int, int], ...] = ()) -> ChoiceTable:
    """Makes a table of one part."""
    points = (MeasuredShape(1, 1, choice),)
    return ChoiceTable(points, points, points, groups)


def every_group_pays(num_rows: int, num_tokens: int) -> bool:  # noqa: ARG001
    """Accepts every group: the backend or the scheduler chooses."""
    return True


def find_nearest(points: Sequence[MeasuredShape], size: float, tokens: float) -> str:
    """Finds the choice at the point whose size and tokens differ by the smallest factors."""
    assert points

    def measure_distance(point: MeasuredShape) -> float:
        return abs(math.log2(max(size, 1) / point.size)) + abs(math.log2(max(tokens, 1) / point.tokens))

    return min(points, key=measure_distance).choice


def find_smallest_groups(worth: Mapping[tuple[int, int], bool]) -> tuple[tuple[int, int], ...]:
    """Finds the smallest (rows, tokens) from which on every measured group is worth its merge, by `worth`.

    No group of the answer contains another one.
    """
    from_here = [
        (rows, tokens)
        for rows, tokens in sorted(worth)
        if all(pays for (more, longer), pays in worth.items() if more >= rows and longer >= tokens)
    ]
    return tuple(
        (rows, tokens)
        for rows, tokens in from_here
        if not any(r <= rows and t <= tokens and (r, t) != (rows, tokens) for r, t in from_here)
    )


class AutoDecode:
    """`DecodeKernel` that delegates to the part that the table names for the batch; graphs always use `captured`."""

    def __init__(
        self,
        parts: Mapping[str, DecodeKernel],
        table: ChoiceTable,
        page_size: int,
        captured: GraphDecodePart | None = None,
    ) -> None:
        self.parts = dict(parts)
        self.table = table
        self.page_size = page_size
        self.captured = captured
        self.chosen = next(iter(self.parts.values()))

    def plan(self, batch: AttentionBatch, groups: tuple[PrefixGroup, ...], window: int) -> None:
        self.chosen = self.parts[self._choose(batch, groups)]
        self.chosen.plan(batch, groups, window)

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:
        self.chosen.run(layer, query, output, sinks)

    def plan_graph(self, batch: AttentionBatch, grouped: bool, window: int) -> None:
        assert self.captured is not None, "no part of these can be captured"
        self.chosen = self.captured
        self.captured.plan_graph(batch, grouped, window)

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        assert self.captured is not None, "no part of these can be captured"
        self.captured.set_groups(groups)

    def _choose(self, batch: AttentionBatch, groups: tuple[PrefixGroup, ...]) -> str:
        if len(self.parts) == 1:
            return next(iter(self.parts))
        if not groups:
            context = float(batch.context_lengths[: batch.num_decode].mean())
            return find_nearest(self.table.decode, batch.num_decode, context)
        num_pages = sum(group.num_pages for group in groups)
        num_rows = sum(group.num_rows for group in groups)
        return find_nearest(self.table.grouped, num_rows / len(groups), num_pages * self.page_size / len(groups))


class AutoChunks:
    """`PrefillKernel` that delegates to the part that the table names for the batch."""

    def __init__(self, parts: Mapping[str, PrefillKernel], table: ChoiceTable) -> None:
        self.parts = dict(parts)
        self.table = table
        self.chosen = next(iter(self.parts.values()))

    def plan(self, batch: AttentionBatch, window: int) -> None:
        self.chosen = self.parts[self._choose(batch)]
        self.chosen.plan(batch, window)

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:
        self.chosen.run(layer, query, output, sinks)

    def _choose(self, batch: AttentionBatch) -> str:
        if len(self.parts) == 1:
            return next(iter(self.parts))
        num_tokens = int(batch.query_lengths[batch.num_decode :].sum())
        return find_nearest(self.table.chunks, num_tokens, float(batch.context_lengths[batch.num_decode :].mean()))
