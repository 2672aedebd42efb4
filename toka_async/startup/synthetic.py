"""Makes steps that no request asked for, which a runner computes at its start to warm up and to find out what it needs.

Works like a small scheduler, over the first pages and slots. Knows messages; what they compute does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toka_async.arrays import Int32, column, i32_column
from toka_async.messages import Prompt, Ready, Step, TokenSampling

GREEDY = TokenSampling(temperature=0.0)


class SyntheticRows:
    """Rows of prompts of zeros that share their first `num_shared` pages. They decode until all end.

    reuse: rows may share their own pages, so that any cache is large enough; their output is then nonsense.
    """

    def __init__(self, ready: Ready, num_shared: int = 0, reuse: bool = False) -> None:
        self._ready = ready
        self._reuse = reuse
        self._num_shared = num_shared
        self._num_pages = num_shared  # given out
        self._lengths: Int32 = np.empty(0, np.int32)  # tokens of each row up to now
        self._owned: Int32 = np.empty(0, np.int32)  # pages of each row
        self._num_joined = 0  # rows that decode
        self._num_keys = 0

    def count_room(self, more: int) -> int:
        """Counts the tokens that a row can have and decode `more` after them."""
        ready = self._ready
        return min(ready.max_context, ready.num_pages * ready.page_size) - more

    def has_room(self, length: int) -> bool:
        """Tells whether another row of this length can begin while the others continue by a token."""
        size = self._ready.page_size
        needed = int((-(-(self._lengths + 1) // size) - self._owned).sum()) + -(-length // size)
        longest = int(self._lengths.max(initial=0)) + 1
        has_pages = self._reuse or self._num_pages + needed <= self._ready.num_pages
        return has_pages and longest <= self._ready.max_context

    def make_step(
        self, lengths: Sequence[int] = (), sampling: Sequence[TokenSampling] = (GREEDY,), num_grouped: int = 0
    ) -> Step:
        """Makes a step of a token of every row, and one whole chunk for each new row.

        Args:
            lengths: of the new rows' prompts, each longer than the shared pages.
            sampling: of the new rows, round and round.
            num_grouped: leading decoding rows that are a group, of the shared pages.
        """
        first, num_new = self._lengths.size, len(lengths)
        joined = i32_column(range(self._num_joined, first))
        self._num_joined = first
        new = np.asarray(lengths, np.int32)
        starts = np.full(num_new, self._num_shared * self._ready.page_size, np.int32)
        keys, prompts = self._make_prompts(lengths, sampling)
        self._lengths = np.concatenate([self._lengths + 1, new])
        self._owned = np.concatenate([self._owned, np.full(num_new, self._num_shared, np.int32)])
        page_slots, page_ids = self._grow()
        slots = i32_column(range(first, first + num_new))
        has_group = num_grouped > 0 and self._num_shared > 0
        return Step(
            step_id=0,
            prompts=prompts,
            admit_slots=slots,
            admit_keys=keys,
            admit_starts=column(starts),
            admit_seeds=column(np.arange(num_new, dtype=np.int64)),
            page_slots=page_slots,
            page_ids=page_ids,
            joined=joined,
            group_starts=i32_column([0] if has_group else []),
            group_rows=i32_column([num_grouped] if has_group else []),
            group_pages=i32_column([self._num_shared] if has_group else []),
            chunk_slots=slots,
            chunk_lengths=column(new - starts),
            chunk_samples=column(np.ones(num_new, np.bool_)),
        )

    def end(self) -> Step:
        """Makes the step that ends all rows. It copies a page too, as those do in which samples part: onto itself."""
        freed, keys, page = i32_column(range(self._lengths.size)), i32_column(range(self._num_keys)), i32_column([0])
        return Step(step_id=0, freed=freed, dropped_prompts=keys, copy_sources=page, copy_targets=page)

    def _make_prompts(
        self, lengths: Sequence[int], sampling: Sequence[TokenSampling]
    ) -> tuple[memoryview, tuple[Prompt, ...]]:
        """Makes keys of the new rows, and a prompt for each length and sampling among them."""
        kinds = [(length, i % len(sampling)) for i, length in enumerate(lengths)]
        key_of = {kind: self._num_keys + i for i, kind in enumerate(dict.fromkeys(kinds))}
        self._num_keys += len(key_of)
        shared = i32_column(range(self._num_shared))
        prompts = (
            Prompt(
                key=key,
                token_ids=column(np.zeros(length, np.int32)),
                num_prompt=length,
                pages=shared,
                sampling=sampling[which],
            )
            for (length, which), key in key_of.items()
        )
        return i32_column(key_of[kind] for kind in kinds), tuple(prompts)

    def _grow(self) -> tuple[memoryview, memoryview]:
        """Adds pages for the tokens that rows have with this step. Returns columns of slots and pages."""
        needed = -(-self._lengths // self._ready.page_size) - self._owned
        slots = np.repeat(np.arange(self._lengths.size, dtype=np.int32), needed)
        pages = np.arange(self._num_pages, self._num_pages + slots.size, dtype=np.int32)
        self._num_pages += slots.size
        self._owned = self._owned + needed
        assert self._reuse or self._num_pages <= self._ready.num_pages, "more pages than there are"
        return column(slots), column(pages % self._ready.num_pages)
