"""What layers of several shapes compute is checked against transformers in tests/parity/test_decoder.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from toka_async.attention.base import AttentionBatch, ChunkRows, ChunkStates, PrefixGroup, WindowPages
from toka_async.attention.build import BuiltAttention
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.layered.backend import LayeredCache, join_attention
from toka_async.memory.virtual import VirtualMemory

CPU = torch.device("cpu")
LAYERS = ((0, 2, 3), (1, 4))
BATCH: Any = object()  # which parts only get
OTHERS: Any = ("rotation", "norm")  # likewise


class Part:
    """Notes what it is told; describes chunks by its number."""

    def __init__(self, number: int, num_cells: int) -> None:
        self.number = number
        self.num_cells = num_cells
        self.told: list[Any] = []
        self.cells = torch.empty(0)

    def plan(self, batch: AttentionBatch) -> None:
        self.told.append(batch)

    def plan_graph(self, batch: AttentionBatch, grouped: bool) -> None:
        self.told.append((batch, grouped))

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        self.told.append(groups)

    def attend(self, layer: int, heads: Tensor, *others: Any) -> Tensor:
        self.told.append((layer, *others))
        return heads + self.number

    def count_chunk_cells(self, num_tokens: int, num_rows: int) -> int:
        return self.num_cells + num_tokens + num_rows

    def describe_chunks(self, cells: Any, chunks: ChunkRows) -> None:  # noqa: ARG002
        cells[: self.num_cells] = self.number

    def plan_mixed(self, batch: AttentionBatch, grouped: bool, chunks: Tensor) -> None:
        self.told.append((batch, grouped))
        self.cells = chunks


def has_many_rows(num_rows: int, num_tokens: int) -> bool:  # noqa: ARG001
    return num_rows > 3


def has_many_tokens(num_rows: int, num_tokens: int) -> bool:  # noqa: ARG001
    return num_tokens > 9


def join(*parts: Part, captured: int = 2, smallest: tuple[tuple[int, int], ...] = ((2, 8), (4, 6))) -> BuiltAttention:
    built: list[BuiltAttention] = []
    for index, (part, group) in enumerate(zip(parts, smallest, strict=True)):
        one: Any = part if index < captured else None
        built.append(BuiltAttention(part, one, group, has_many_rows if index else has_many_tokens, mixed=one))
    return join_attention(built, LAYERS)


def test_each_layer_goes_to_the_backend_of_its_shape() -> None:
    first, second = Part(1, 0), Part(2, 0)
    joined = join(first, second).backend
    joined.plan(BATCH)
    for layer, (number, place) in enumerate(((1, 0), (2, 0), (1, 1), (1, 2), (2, 1))):
        assert joined.attend(layer, torch.zeros(1), *OTHERS) == number
        assert (first, second)[number - 1].told[-1] == (place, *OTHERS)
    assert first.told[0] is second.told[0] is BATCH


def test_layers_with_a_window_see_their_own_pages() -> None:
    first, second, table = Part(1, 0), Part(2, 0), torch.zeros(2, 3, dtype=torch.int32)
    batch = AttentionBatch(
        num_decode=0,
        query_lengths=np.zeros(0, np.int32),
        context_lengths=np.zeros(0, np.int32),
        contexts=table[0],
        slots=table[0].long(),
        page_table=table,
        write_indices=table[0].long(),
        windows=WindowPages(table + 1, table[0].long() + 5),
    )
    built = [BuiltAttention(part, part, mixed=part) for part in (first, second)]
    joined = join_attention(built, LAYERS, [False, True])
    assert joined.graphs is not None
    assert joined.mixed is not None
    joined.backend.plan(batch)
    joined.graphs.plan_graph(batch, grouped=False)
    joined.mixed.plan_mixed(batch, False, torch.zeros(4))
    seen = [first.told[0], first.told[1][0], first.told[2][0]]
    assert all(each is batch for each in seen)
    for each in (second.told[0], second.told[1][0], second.told[2][0]):
        assert bool((each.page_table == 1).all())
        assert bool((each.write_indices == 5).all())
    alone = join_attention(built[1:], [(0,)], [True]).backend
    alone.plan(batch)
    assert bool((second.told[-1].page_table == 1).all())


def test_graphs_are_of_all_shapes_or_of_none() -> None:
    first, second = Part(1, 3), Part(2, 5)
    graphs = join(first, second).graphs
    assert graphs is not None
    graphs.plan_graph(BATCH, grouped=True)
    graphs.set_groups(())
    assert first.told == second.told == [(BATCH, True), ()]
    without = join(first, second, captured=1)
    assert without.graphs is None
    assert without.mixed is None


def test_each_shape_has_its_share_of_the_cells() -> None:
    first, second = Part(1, 3), Part(2, 5)
    mixed = join(first, second).mixed
    assert mixed is not None
    cells = np.zeros(mixed.count_chunk_cells(1, 1), dtype=np.int32)
    mixed.describe_chunks(cells, ChunkRows(1, 1, 0, cells, cells.astype(np.int64), ChunkStates(cells)))
    mixed.plan_mixed(BATCH, False, torch.from_numpy(cells))
    mixed.set_groups(())
    assert first.cells.tolist() == [1] * 3 + [0] * 4
    assert second.cells.tolist() == [2] * 5 + [0] * 2
    assert first.told == second.told == [(BATCH, False), ()]


def test_a_group_pays_if_it_does_for_all() -> None:
    joined = join(Part(1, 0), Part(2, 0))
    assert joined.smallest_group == (4, 8)
    assert [joined.pays(rows, tokens) for rows, tokens in ((3, 10), (4, 9), (4, 10))] == [False, False, True]
    assert join(Part(1, 0), Part(2, 0), smallest=((2, 8), (0, 0))).smallest_group == (0, 0)


def test_one_shape_is_left_as_it_is() -> None:
    built = BuiltAttention(Part(1, 0))
    assert join_attention([built], [(0, 1)]) is built


def test_what_all_shapes_have_is_counted() -> None:
    parts = [KVCache(2, 3, heads, 4, dim, torch.float32, CPU) for heads, dim in ((2, 4), (1, 8))]
    cache = LayeredCache(parts)
    assert cache.num_bytes == 2 * 2 * 2 * (3 * 4 * 8 * 4)
    assert cache.mapped_bytes == 0
    for part in parts:  # as on a GPU
        part._memory = cast(VirtualMemory, SimpleNamespace(mapped_bytes=1 << 21))
    assert cache.mapped_bytes == 1 << 22


def test_pages_are_copied_and_given_back_in_all_shapes() -> None:
    parts = [KVCache(2, 3, heads, 4, dim, torch.float32, CPU) for heads, dim in ((2, 4), (1, 8))]
    cache = LayeredCache(parts)
    for part in parts:
        part.keys[1][0] = 7.0
    cache.copy_pages(torch.tensor([0]), torch.tensor([2]))
    assert all(bool((part.keys[1][2] == 7).all()) and not part.keys[1][1].any() for part in parts)
    parts[1].of_windows = True
    cache.copy_pages(torch.tensor([2]), torch.tensor([1]), (torch.tensor([1]), torch.tensor([0])))
    assert bool((parts[0].keys[1][1] == 7).all())
    assert not parts[1].keys[1][:2].any()
    cache.release()
    cache.restore()
    assert not any(part.keys[1].any() for part in parts)
