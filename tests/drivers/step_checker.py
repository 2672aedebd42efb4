"""A rank that computes nothing, and refuses steps that no scheduler would send."""

from __future__ import annotations

from toka_async.arrays import as_i32, as_i64
from toka_async.messages import Prompt, Ready, Step


class StepChecker:
    """Keeps rows as plain Python.

    tokens: of each step so far. rows: decoding ones and chunks of each. groups: all, as (first row, rows, pages).
    """

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.tokens: list[int] = []
        self.rows: list[tuple[int, int]] = []
        self.groups: list[tuple[int, int, int]] = []
        self._prompts: dict[int, Prompt] = {}
        self._pages: dict[int, list[int]] = {}  # of each slot
        self._prompt_of: dict[int, Prompt] = {}
        self._done: dict[int, int] = {}  # tokens of a slot
        self._order: list[int] = []

    def check(self, step: Step) -> None:
        """Applies the step; an assertion fails where it cannot be computed."""
        for key in as_i32(step.dropped_prompts).tolist():
            del self._prompts[key]
        for slot in as_i32(step.freed).tolist():
            del self._pages[slot], self._done[slot], self._prompt_of[slot]
            if slot in self._order:
                self._order.remove(slot)
        self._admit(step)
        self._order += as_i32(step.joined).tolist()
        assert len(set(self._order)) == len(self._order)
        self._check_groups(step)
        for slot in self._order:
            self._advance(slot, 1)
        chunks = [*zip(as_i32(step.chunk_slots).tolist(), as_i32(step.chunk_lengths).tolist(), strict=True)]
        for slot, length in chunks:
            assert slot not in self._order
            assert length >= 1
            self._advance(slot, length)
            assert self._done[slot] == len(as_i32(self._prompt_of[slot].token_ids))
        self._check_pages()
        self.rows.append((len(self._order), len(chunks)))
        self.tokens.append(len(self._order) + sum(length for _, length in chunks))
        assert self.tokens[-1] <= self.ready.max_tokens

    @property
    def is_empty(self) -> bool:
        return not (self._prompts or self._pages or self._order)

    def _admit(self, step: Step) -> None:
        for prompt in step.prompts:
            assert prompt.key not in self._prompts
            assert as_i32(prompt.token_ids).size >= 1
            self._prompts[prompt.key] = prompt
        columns = (as_i32(step.admit_slots), as_i32(step.admit_keys), as_i32(step.admit_starts))
        assert as_i64(step.admit_seeds).size == columns[0].size
        for slot, key, start in zip(*(column.tolist() for column in columns), strict=True):
            assert slot not in self._pages
            assert 0 <= slot < self.ready.max_seqs
            self._prompt_of[slot] = prompt = self._prompts[key]
            self._pages[slot] = as_i32(prompt.pages).tolist()
            assert start <= len(self._pages[slot]) * self.ready.page_size
            self._done[slot] = start
        for slot, page in zip(as_i32(step.page_slots).tolist(), as_i32(step.page_ids).tolist(), strict=True):
            self._pages[slot].append(page)

    def _advance(self, slot: int, length: int) -> None:
        self._done[slot] += length
        assert self._done[slot] <= self.ready.max_context
        assert self._done[slot] <= len(self._pages[slot]) * self.ready.page_size

    def _check_groups(self, step: Step) -> None:
        columns = (as_i32(step.group_starts), as_i32(step.group_rows), as_i32(step.group_pages))
        end = 0
        for first, num_rows, num_pages in zip(*(column.tolist() for column in columns), strict=True):
            assert end <= first
            end = first + num_rows
            assert end <= len(self._order)
            members = self._order[first:end]
            assert len({tuple(self._pages[slot][:num_pages]) for slot in members}) == 1
            assert all(self._done[slot] >= num_pages * self.ready.page_size for slot in members)
            self.groups.append((first, num_rows, num_pages))

    def _check_pages(self) -> None:
        """Every page is one row's own, but for those of prompts."""
        owned: list[int] = []
        shared: set[int] = set()
        for slot, pages in self._pages.items():
            of_prompt = as_i32(self._prompt_of[slot].pages).size
            shared |= set(pages[:of_prompt])
            owned += pages[of_prompt:]
        assert len(set(owned)) == len(owned)
        assert not shared & set(owned)
        assert all(0 <= page < self.ready.num_pages for page in (*owned, *shared))
