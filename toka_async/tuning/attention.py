"""Chooses between attention's parts: times them at a handful of shapes, and makes the table that chooses.

A part is timed as a step uses it: planned once on the host, run once for each layer. Knows parts by name only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from toka_async.attention.base import PrefixGroup
from toka_async.attention.build import AttentionParts
from toka_async.attention.choice import MARGIN, ChoiceTable, MeasuredShape, choose_always, find_smallest_groups
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.try_out import TrialShape, make_batch
from toka_async.bar import Show, show_nothing
from toka_async.tuning.clock import time_calls, time_host
from toka_async.tuning.store import Facts

ROWS = (1, 16, 128, 1024, 8192)
CONTEXTS = (128, 1024, 8192, 32768)  # on average: rows are uneven
CHUNKS = (
    *((1, 512, 0), (1, 4096, 0), (8, 512, 0), (8, 1024, 0), (32, 1024, 0)),
    *((1, 512, 8192), (1, 256, 32768), (32, 256, 1024), (128, 64, 1024)),
)
GROUP_ROWS = (4, 8, 16, 64, 512)
GROUP_TOKENS = (64, 256, 512, 1024, 4096)
GROUPED_ROWS = 4096  # rows of all groups together
OWN_TOKENS = 64  # tokens of a grouped row of its own
MOST_TOKENS = 1 << 22  # of all rows of a measured batch: some milliseconds to read
LARGEST = 1 << 30  # rows or tokens of any shape
_ROUNDS = 3
_REPEATS = 3  # runs in each round

T = TypeVar("T")


class PartClock(Protocol):
    def __call__(self, plan: Callable[[], None], run: Callable[[], None], num_layers: int) -> float:
        """Returns the seconds of a step: one plan, and a run for each layer."""
        ...


def time_part(plan: Callable[[], None], run: Callable[[], None], num_layers: int) -> float:
    """Returns the host's time of planning and the device's of running, the least of some rounds: disturbances only add.

    The first round, which may compile, does not count.
    """
    plan()
    run()
    rounds = [(time_host(plan), time_calls(run, _REPEATS) / 1000 / _REPEATS) for _ in range(_ROUNDS)]
    return min(planned for planned, _ in rounds) + num_layers * min(ran for _, ran in rounds)


@dataclass(slots=True, frozen=True)
class AttentionChoice:
    """The `Choice` of the part for each shape of a step, and of the groups whose prefix is worth reading once."""

    parts: AttentionParts
    clock: PartClock = time_part
    show: Show = show_nothing
    name: ClassVar[str] = "attention"
    kind: ClassVar[Any] = ChoiceTable

    @property
    def cache(self) -> KVCache:
        return self.parts.cache

    def measure(self) -> ChoiceTable:
        """Measures which parts are fastest. A single part is measured for its groups alone."""
        grouped, groups = self._measure_groups()
        table = choose_always(next(iter(self.parts.decode)), groups)
        if len(self.parts.decode) == 1 and len(self.parts.chunks) == 1:
            return table
        return ChoiceTable(
            decode=self._choose_decode() or table.decode,
            grouped=grouped or table.grouped,
            chunks=self._choose_chunks() or table.chunks,
            groups=groups,
        )

    def describe(self) -> Facts:
        cache = self.cache
        return {
            "heads": [self.parts.num_heads, cache.num_kv_heads, cache.head_dim],
            "layers": len(cache.keys),
            "page_size": cache.page_size,
            "dtype": str(cache.dtype),
            "stored": str(cache.keys[0].dtype),
            "sinks": self.parts.sinks is not None,
            "parts": [list(self.parts.decode), list(self.parts.chunks)],
            "shapes": [self._list_decode_shapes(), self._list_chunk_shapes(), self._list_group_shapes()],
        }

    def admits(self, answer: ChoiceTable) -> bool:
        """Tells whether the answer names parts that exist, at shapes that can occur."""
        decode, chunks = (*answer.decode, *answer.grouped), answer.chunks
        return (
            bool(answer.decode and answer.grouped and answer.chunks)
            and {point.choice for point in decode} <= set(self.parts.decode)
            and {point.choice for point in chunks} <= set(self.parts.chunks)
            and all(0 < number <= LARGEST for point in (*decode, *chunks) for number in (point.size, point.tokens))
            and set(answer.groups) <= {(rows, tokens) for rows, tokens, _ in self._list_group_shapes()}
        )

    def _choose_decode(self) -> tuple[MeasuredShape, ...]:
        points = []
        for rows, mean in self._follow(self._list_decode_shapes(), "decode shapes measured"):
            contexts = spread_contexts(rows, mean, self.cache.num_pages * self.cache.page_size)
            times = self._time_decode(TrialShape([(context, 1) for context in contexts], rows))
            points.append(MeasuredShape(rows, mean, _find_fastest(times)))
        return tuple(points)

    def _list_decode_shapes(self) -> list[tuple[int, int]]:
        """Lists rows and mean context of each shape."""
        most_tokens = min(MOST_TOKENS, self.cache.num_pages * self.cache.page_size)
        return [
            (rows, context)
            for rows in ROWS
            for context in CONTEXTS
            if rows <= self.parts.max_seqs and rows * context <= most_tokens
        ]

    def _choose_chunks(self) -> tuple[MeasuredShape, ...]:
        return tuple(
            MeasuredShape(rows * length, before + length, _find_fastest(self._time_chunks(rows, length, before)))
            for rows, length, before in self._follow(self._list_chunk_shapes(), "chunk shapes measured")
        )

    def _list_chunk_shapes(self) -> list[tuple[int, int, int]]:
        """Lists rows, tokens of a row's chunk, and tokens before it."""
        most_tokens = self.cache.num_pages * self.cache.page_size
        return [
            (rows, length, before)
            for rows, length, before in CHUNKS
            if rows <= self.parts.max_seqs
            and rows * length <= self.parts.max_tokens
            and rows * (before + length) <= most_tokens
        ]

    def _measure_groups(self) -> tuple[tuple[MeasuredShape, ...], tuple[tuple[int, int], ...]]:
        """Measures the fastest part with groups, and which groups beat the fastest part without."""
        points: list[MeasuredShape] = []
        worth: dict[tuple[int, int], bool] = {}
        for num_rows, num_tokens, num_groups in self._follow(self._list_group_shapes(), "group shapes measured"):
            num_pages = self._count_pages(num_tokens)
            groups = tuple(PrefixGroup(i * num_rows, num_rows, num_pages) for i in range(num_groups))
            num_decode = num_rows * num_groups
            rows = ((num_pages * self.cache.page_size + OWN_TOKENS, 1),) * num_decode
            shared = self._time_decode(TrialShape(rows, num_decode, groups))
            alone = self._time_decode(TrialShape(rows, num_decode), groups)
            points.append(MeasuredShape(num_rows, num_tokens, _find_fastest(shared)))
            worth[num_rows, num_tokens] = min(shared.values()) < MARGIN * min(alone.values())
        return tuple(points), find_smallest_groups(worth)

    def _list_group_shapes(self) -> list[tuple[int, int, int]]:
        """Lists rows of a group, tokens of its prefix, and groups: those of a full step, if the cache has room."""
        shapes = []
        for num_rows in GROUP_ROWS:
            for num_tokens in GROUP_TOKENS:
                context = self._count_pages(num_tokens) * self.cache.page_size + OWN_TOKENS
                num_groups = min(self.parts.max_seqs, GROUPED_ROWS, MOST_TOKENS // context) // num_rows
                if num_groups and context <= self.cache.num_pages * self.cache.page_size:
                    shapes.append((num_rows, num_tokens, num_groups))
        return shapes

    def _follow(self, shapes: Sequence[T], what: str) -> Iterator[T]:
        """Yields the shapes, and shows how many are measured."""
        for done, shape in enumerate(shapes):
            self.show(done, len(shapes), what)
            yield shape

    def _count_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.page_size)

    def _time_decode(self, shape: TrialShape, alike: tuple[PrefixGroup, ...] = ()) -> dict[str, float]:
        """Times each part, in seconds. Rows of `alike` share pages, too, but the parts are not told."""
        batch = make_batch(self.cache, shape, shape.groups or alike)
        query = self._make_queries(shape.num_decode)
        run = 0, query, torch.empty_like(query), self.parts.sinks
        return {
            name: self._time(partial(part.plan, batch, shape.groups, 0), partial(part.run, *run))
            for name, part in self.parts.decode.items()
        }

    def _time_chunks(self, num_rows: int, length: int, before: int) -> dict[str, float]:
        batch = make_batch(self.cache, TrialShape(((before + length, length),) * num_rows, 0))
        query = self._make_queries(num_rows * length)
        run = 0, query, torch.empty_like(query), self.parts.sinks
        return {
            name: self._time(partial(part.plan, batch, 0), partial(part.run, *run))
            for name, part in self.parts.chunks.items()
        }

    def _make_queries(self, num_tokens: int) -> Tensor:
        cache = self.cache
        return torch.randn((num_tokens, self.parts.num_heads, cache.head_dim), device=cache.device).to(cache.dtype)

    def _time(self, plan: Callable[[], None], run: Callable[[], None]) -> float:
        return self.clock(plan, run, len(self.cache.keys))


def measure_table(parts: AttentionParts) -> ChoiceTable:
    return AttentionChoice(parts).measure()


def spread_contexts(num_rows: int, mean: int, most: int) -> list[int]:
    """Spreads contexts as those of conversations: quantiles of the exponential distribution, in a random order.

    Of 128 rows the longest has 5.5 times the mean. most: tokens of a row.
    """
    quantiles = (np.arange(num_rows) + 0.5) / num_rows
    spread = -np.log1p(-quantiles)
    contexts = np.clip(spread * mean / spread.mean(), 1, most).astype(int)
    return [int(context) for context in np.random.default_rng(0).permutation(contexts)]


def _find_fastest(times: Mapping[str, float]) -> str:
    """Finds the first that is as fast as the fastest, within the margin."""
    best = min(times.values())
    return next(name for name, seconds in times.items() if seconds * MARGIN <= best)
