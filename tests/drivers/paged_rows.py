"""Runs rows through a decoder and an attention backend as a rank does: pages, chunks and decoding rows in one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from toka_async.attention.base import AttentionBackend, AttentionBatch, PrefixGroup
from toka_async.model.decoder import Decoder


@dataclass(slots=True)
class PagedRow:
    """A sequence whose tokens are all known; `pages` hold the first `done` of them."""

    token_ids: list[int]
    num_prompt: int
    pages: list[int] = field(default_factory=list)
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)

    def next_count(self, rng: np.random.Generator) -> int:
        """One decoding token, or a chunk of the prompt of random length."""
        left = self.num_prompt - self.done
        return int(rng.integers(1, left + 1)) if left > 0 else 1


def make_batch(
    rows: Sequence[tuple[list[int], int, int]],
    num_decode: int,
    page_size: int,
    groups: tuple[PrefixGroup, ...] = (),
    device: torch.device | None = None,
) -> AttentionBatch:
    """A batch of rows, each (pages, context length, query length), scattered over a page table larger than needed."""
    width = max(len(pages) for pages, _, _ in rows) + 2
    slots = torch.randperm(len(rows) + 3, generator=torch.Generator().manual_seed(len(rows)))[: len(rows)]
    table = torch.zeros((len(rows) + 3, width), dtype=torch.int32)
    table[slots] = torch.tensor([pages + [0] * (width - len(pages)) for pages, _, _ in rows], dtype=torch.int32)
    contexts = np.array([context for _, context, _ in rows], dtype=np.int32)
    writes = [
        pages[position // page_size] * page_size + position % page_size
        for pages, context, count in rows
        for position in range(context - count, context)
    ]
    return AttentionBatch(
        num_decode=num_decode,
        query_lengths=np.array([count for _, _, count in rows], dtype=np.int32),
        context_lengths=contexts,
        contexts=torch.from_numpy(contexts).to(device),
        slots=slots.to(device),
        page_table=table.to(device),
        write_indices=torch.tensor(writes, dtype=torch.int64, device=device),
        groups=groups,
    )


@torch.inference_mode()
def run_rows(
    decoder: Decoder,
    attention: AttentionBackend,
    rows: list[PagedRow],
    page_size: int,
    free_pages: Iterator[int],
    seed: int = 0,
) -> None:
    """Steps until every row is done, each step with a random part of the rows; fills their `logits`."""
    rng = np.random.default_rng(seed)
    device = next(decoder.parameters()).device
    while unfinished := [row for row in rows if row.done < len(row.token_ids)]:
        chosen = [row for row in unfinished if rng.random() < 0.8] or unfinished
        chosen.sort(key=lambda row: row.done < row.num_prompt)
        counts = [row.next_count(rng) for row in chosen]
        for row, count in zip(chosen, counts, strict=True):
            while len(row.pages) * page_size < row.done + count:
                row.pages.append(next(free_pages))
        shapes = [(row.pages, row.done + count, count) for row, count in zip(chosen, counts, strict=True)]
        attention.plan(make_batch(shapes, sum(row.done >= row.num_prompt for row in chosen), page_size, device=device))
        ids = [i for row, count in zip(chosen, counts, strict=True) for i in row.token_ids[row.done :][:count]]
        positions = [p for _, context, count in shapes for p in range(context - count, context)]
        hidden = decoder(torch.tensor(ids, device=device), torch.tensor(positions, device=device), attention)
        logits = torch.split(decoder.logits(hidden), counts)
        for row, count, part in zip(chosen, counts, logits, strict=True):
            row.done += count
            row.logits.append(part)
