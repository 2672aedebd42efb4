"""A model without weights: its logits are a hash of all tokens that a row's pages hold.

So any slip in page tables, positions, copies or order changes what is sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.base import AttentionBackend, AttentionBatch, ChunkRows, PrefixGroup, QueryKeyNorm
from toka_async.model.rng import draw_uniforms

_PRIME = 1_000_003
_MODULUS = 2**40


def hash_of(tokens: Sequence[int]) -> int:
    value = 7
    for token in tokens:
        value = (value * _PRIME + token + 1) % _MODULUS
    return value


def logits_of(tokens: Sequence[int], vocab_size: int) -> Tensor:
    """float32 [1, vocab]."""
    return _logits(torch.tensor([[float(hash_of(tokens))]], dtype=torch.float64), vocab_size)


def _logits(hidden: Tensor, vocab_size: int) -> Tensor:
    seeds = np.repeat(hidden[:, 0].numpy().astype(np.int64), vocab_size)
    indices = np.tile(np.arange(vocab_size), len(hidden))
    return torch.from_numpy(6 * draw_uniforms(seeds, indices).reshape(-1, vocab_size)).float()


class FakeCache:
    """Holds the token of each cache entry in place of keys and values."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.tokens = np.full((num_pages, page_size), -1, dtype=np.int64)

    def copy_pages(
        self,
        sources: Tensor,
        targets: Tensor,
        windows: tuple[Tensor, Tensor] | None = None,  # noqa: ARG002
    ) -> None:
        self.tokens[targets.numpy()] = self.tokens[sources.numpy()]


class FakeAttention:
    """Keeps the step's batch, for the model to look at. groups: set before the replays of graphs."""

    batch: AttentionBatch

    def __init__(self) -> None:
        self.groups: list[tuple[PrefixGroup, ...]] = []

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch

    def plan_graph(self, batch: AttentionBatch, grouped: bool) -> None:  # noqa: ARG002
        assert batch.num_decode == len(batch.slots)
        self.batch = dataclasses.replace(batch, context_lengths=batch.contexts.numpy())

    def count_chunk_cells(self, num_tokens: int, num_rows: int) -> int:  # noqa: ARG002
        return 2 + 2 * num_rows

    def describe_chunks(self, cells: Int32, chunks: ChunkRows) -> None:
        assert not cells.any()
        described = np.concatenate([[chunks.num_decode, chunks.lengths.size], chunks.lengths, chunks.contexts])
        cells[: described.size] = described

    def plan_mixed(self, batch: AttentionBatch, grouped: bool, chunks: Tensor) -> None:  # noqa: ARG002
        num_decode, count, *rest = chunks.tolist()
        assert not batch.contexts[num_decode:].any()
        self.batch = dataclasses.replace(
            batch,
            num_decode=num_decode,
            query_lengths=np.array([1] * num_decode + rest[:count], dtype=np.int32),
            context_lengths=np.array(batch.contexts[:num_decode].tolist() + rest[count : 2 * count], dtype=np.int32),
            slots=batch.slots[: num_decode + count],
        )

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        self.groups.append(groups)

    def attend(
        self,
        layer: int,
        heads: Tensor,  # noqa: ARG002
        rotation: tuple[Tensor, Tensor],  # noqa: ARG002
        norm: QueryKeyNorm | None = None,  # noqa: ARG002
        sinks: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        raise AssertionError(f"the fake model has no layer {layer}")


class FakeModel:
    """Reads a row's tokens through its page table, as attention would. rehearsed: of each step, whether it was."""

    def __init__(self, vocab_size: int, cache: FakeCache) -> None:
        self.vocab_size = vocab_size
        self.cache = cache
        self.rehearsed: list[bool] = []
        self._rehearses = False

    def forward(
        self, inputs: Tensor, positions: Tensor, attention: AttentionBackend, wanted: Tensor | None = None
    ) -> Tensor:
        return self.finish(*self.begin(inputs, positions, attention), wanted)

    def begin(self, inputs: Tensor, positions: Tensor, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """Returns a hash for each token, 0 for padding, and the tokens."""
        assert isinstance(attention, FakeAttention)
        self.rehearsed.append(self._rehearses)
        batch = attention.batch
        self.cache.tokens.reshape(-1)[batch.write_indices.numpy()] = inputs.numpy()
        hashes: list[int] = []
        expected: list[int] = []
        for pages, length, context in zip(
            batch.page_table[batch.slots].numpy(),
            batch.query_lengths.tolist(),
            batch.context_lengths.tolist(),
            strict=True,
        ):
            tokens = self.cache.tokens[pages].reshape(-1)[:context].tolist()
            ends = range(context - length + 1, context + 1)
            expected += [end - 1 for end in ends]
            hashes += [hash_of(tokens[:end]) for end in ends]
        padding = [0] * (len(inputs) - len(expected))
        assert positions.tolist() == expected + padding
        return torch.tensor(hashes + padding, dtype=torch.float64)[:, None], inputs[:, None].double()

    def finish(self, attended: Tensor, residual: Tensor, wanted: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return attended if wanted is None else attended[wanted]

    @contextmanager
    def rehearse(self) -> Iterator[None]:
        self._rehearses = True
        yield
        self._rehearses = False

    def logits(self, hidden: Tensor) -> Tensor:
        return _logits(hidden, self.vocab_size)


class FakeStage(FakeModel):
    """A stage of such a model: residuals are the tokens, which every stage keeps in a cache of its own."""

    def __init__(self, vocab_size: int, cache: FakeCache, is_first: bool, is_last: bool) -> None:
        super().__init__(vocab_size, cache)
        self.is_first = is_first
        self.is_last = is_last

    def begin(self, inputs: Tensor, positions: Tensor, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        assert inputs.shape == ((len(positions),) if self.is_first else (len(positions), 1))
        return super().begin(inputs if self.is_first else inputs[:, 0].long(), positions, attention)

    def finish(self, attended: Tensor, residual: Tensor, wanted: Tensor | None = None) -> Tensor:
        if self.is_last:
            return super().finish(attended, residual, wanted)
        assert wanted is None, "the next stage needs every token"
        return residual
