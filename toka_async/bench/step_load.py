"""Steps of one kind for a rank: decoding rows of one length, in groups or alone, or whole prompts.

Plays the scheduler in miniature. Rows decode after prompts of random tokens: one prompt of a group is computed, and its
pages are copied for the group's other rows. Knows messages, no runner and no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from toka_async.arrays import Int32, column, i32_column
from toka_async.messages import Prompt, Ready, Step, TokenSampling

COPIED = 1024  # pages copied in one step: a rank reads all of them before it writes any


class DoesNotFitError(Exception):
    """The rank is too small for the case; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step in which `rows` decode at `context` tokens, or one prompt of `prompt` tokens is computed.

    prefix: leading tokens that the rows of a group share, whole pages. groups: of about equal size; 0 without a
    prefix. asking: the first of the rows, which ask for `sampling`.
    """

    rows: int = 0
    context: int = 0
    prefix: int = 0
    groups: int = 0
    prompt: int = 0
    sampling: str = "plain"
    asking: int = 0

    @property
    def num_tokens(self) -> int:
        return self.rows or self.prompt


class DecodeSteps:
    """Steps in each of which all rows of a case decode.

    num_steps: the most steps that `step` will give. grouped: tells the rank which rows share their prefix. Rows that
    ask for something count the second half of their context as output. Raises DoesNotFitError.
    """

    def __init__(self, case: Case, ready: Ready, sampling: TokenSampling, num_steps: int, grouped: bool) -> None:
        self._case, self._ready, self._sampling = case, ready, sampling
        self._asked = make_sampling(case.sampling, sampling, ready.vocab_size)
        self._sizes = np.full(max(case.groups, 1), case.rows // max(case.groups, 1), np.int32)
        self._sizes[: case.rows % self._sizes.size] += 1  # rows of each group
        self._shared = case.prefix // ready.page_size
        self._own = -(-(case.context + num_steps) // ready.page_size) - self._shared
        self._check(num_steps)
        num_groups = self._sizes.size if grouped and self._shared else 0
        self._groups = {
            "group_starts": column((np.cumsum(self._sizes) - self._sizes)[:num_groups].astype(np.int32)),
            "group_rows": column(self._sizes[:num_groups]),
            "group_pages": i32_column([self._shared] * num_groups),
        }

    def _check(self, num_steps: int) -> None:
        case, ready = self._case, self._ready
        pages = self._sizes.size * self._shared + case.rows * self._own
        if case.rows > ready.max_seqs:
            raise DoesNotFitError(f"schedule.max_seqs is {ready.max_seqs}")
        if case.context + num_steps > ready.max_context:
            raise DoesNotFitError(f"model.max_context is {ready.max_context}, with the timed steps")
        if pages > ready.num_pages:
            raise DoesNotFitError(
                f"it takes {pages * ready.page_size} tokens of cache, there are {ready.num_pages * ready.page_size}"
            )

    def prepare(self) -> Iterator[Step]:
        """Yields steps until every row decodes; the last of them is the first decoding pass."""
        yield from self._compute_prompts()
        yield from self._copy_pages()
        case = self._case
        slots = np.arange(case.rows, dtype=np.int32)
        pages = np.stack([self._pages_of(row) for row in range(case.rows)])
        keys = self._keys()
        joining = Step(
            step_id=0,
            freed=i32_column(range(self._sizes.size)),
            prompts=tuple(self._asking_prompt(key) for key in np.unique(keys[: case.asking]).tolist()),
            admit_slots=column(slots),
            admit_keys=column(keys),
            admit_starts=column(np.full(case.rows, case.context - 1, np.int32)),
            admit_seeds=column(np.arange(case.rows, dtype=np.int64)),
            page_slots=column(np.repeat(slots, self._own)),
            page_ids=column(pages.ravel()),
            joined=column(slots),
        )
        yield msgspec.structs.replace(joining, **self._groups)

    def step(self) -> Step:
        """Computes another token of every row."""
        return msgspec.structs.replace(Step(step_id=0), **self._groups)

    def end(self) -> Step:
        """Frees all rows."""
        keys = {*range(self._sizes.size), *self._keys().tolist()}
        return Step(step_id=0, freed=i32_column(range(self._case.rows)), dropped_prompts=i32_column(keys))

    def _keys(self) -> Int32:
        """Returns the keys of the rows' prompts: a group's number, and another one for those of its rows that ask."""
        keys = np.repeat(np.arange(self._sizes.size, dtype=np.int32), self._sizes)
        keys[: self._case.asking] += self._sizes.size
        return keys

    def _asking_prompt(self, key: int) -> Prompt:
        group, length = key - self._sizes.size, self._case.context
        prompt = random_prompt(group, length, self._shared_pages(group), self._ready, self._asked)
        return msgspec.structs.replace(prompt, key=key, num_prompt=length - length // 2)

    def _compute_prompts(self) -> Iterator[Step]:
        """Computes the prompt of each group's first row, except the last token, which is the first to decode."""
        first_rows = (np.cumsum(self._sizes) - self._sizes).tolist()
        own = np.concatenate([self._pages_of(row) for row in first_rows])
        slots = np.arange(len(first_rows), dtype=np.int32)
        prompts = tuple(
            random_prompt(group, self._case.context, self._shared_pages(group), self._ready, self._sampling)
            for group in range(len(first_rows))
        )
        yield Step(
            step_id=0,
            prompts=prompts,
            admit_slots=column(slots),
            admit_keys=column(slots),
            admit_starts=column(np.zeros_like(slots)),
            admit_seeds=column(np.zeros(slots.size, np.int64)),
            page_slots=column(np.repeat(slots, self._own)),
            page_ids=column(own),
        )
        for slot, length in itertools.product(slots.tolist(), self._chunks()):
            yield Step(
                step_id=0,
                chunk_slots=i32_column([slot]),
                chunk_lengths=i32_column([length]),
                chunk_samples=column(np.zeros(1, np.bool_)),
            )

    def _chunks(self) -> Iterator[int]:
        """Yields the lengths of a prompt's chunks."""
        left = self._case.context - 1
        while left > 0:
            yield min(left, self._ready.max_tokens)
            left -= self._ready.max_tokens

    def _copy_pages(self) -> Iterator[Step]:
        """Copies the pages of a group's first row, beyond the shared ones, for the other rows."""
        used = -(-(self._case.context - 1) // self._ready.page_size) - self._shared
        if used <= 0:
            return
        sources, targets, row = [], [], 0
        for size in self._sizes.tolist():
            first = self._pages_of(row)[:used]
            sources += [first] * (size - 1)
            targets += [self._pages_of(other)[:used] for other in range(row + 1, row + size)]
            row += size
        if not sources:
            return
        all_sources, all_targets = np.concatenate(sources), np.concatenate(targets)
        for start in range(0, all_sources.size, COPIED):
            part = slice(start, start + COPIED)
            yield Step(step_id=0, copy_sources=column(all_sources[part]), copy_targets=column(all_targets[part]))

    def _shared_pages(self, group: int) -> Int32:
        return np.arange(group * self._shared, (group + 1) * self._shared, dtype=np.int32)

    def _pages_of(self, row: int) -> Int32:
        """Returns a row's own pages, which follow the groups' shared ones."""
        first = self._sizes.size * self._shared + row * self._own
        return np.arange(first, first + self._own, dtype=np.int32)


class PromptSteps:
    """Steps that each compute another prompt, in one chunk, over the same pages. Raises DoesNotFitError."""

    def __init__(self, case: Case, ready: Ready, sampling: TokenSampling) -> None:
        self._case, self._ready, self._sampling = case, ready, sampling
        self._key = 0
        room = min(ready.max_tokens, ready.max_context - 1, ready.num_pages * ready.page_size - 1)
        if case.prompt > room:
            limits = "schedule.max_tokens, model.max_context, cache.num_tokens"
            raise DoesNotFitError(f"a step has at most {room} tokens of a prompt ({limits})")

    def prepare(self) -> Iterator[Step]:
        yield self.step()

    def step(self) -> Step:
        """Replaces the prompt by a new one."""
        before, self._key, length = self._key, self._key + 1, self._case.prompt
        slot = i32_column([0])
        num_pages = -(-(length + 1) // self._ready.page_size)
        return Step(
            step_id=0,
            dropped_prompts=i32_column([before] if before else []),
            freed=i32_column([0] if before else []),
            prompts=(random_prompt(self._key, length, np.empty(0, np.int32), self._ready, self._sampling),),
            admit_slots=slot,
            admit_keys=i32_column([self._key]),
            admit_starts=slot,
            admit_seeds=column(np.zeros(1, np.int64)),
            page_slots=column(np.zeros(num_pages, np.int32)),
            page_ids=i32_column(range(num_pages)),
            chunk_slots=slot,
            chunk_lengths=i32_column([length]),
            chunk_samples=column(np.ones(1, np.bool_)),
        )

    def end(self) -> Step:
        return Step(step_id=0, freed=i32_column([0]), dropped_prompts=i32_column([self._key]))


def make_sampling(name: str, sampling: TokenSampling, vocab_size: int) -> TokenSampling:
    """Adds what a row asks for by this name."""
    rng = np.random.default_rng(0)
    few, many = (rng.choice(vocab_size, min(count, vocab_size), replace=False).astype(np.int32) for count in (4, 300))
    asked: dict[str, dict[str, Any]] = {
        "plain": {},
        "min_tokens": {"min_tokens": 1 << 20, "end_ids": column(few)},
        "logit_bias": {"bias_ids": column(many), "bias_values": column(np.full(many.size, 0.5, np.float32))},
        "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        "logprobs": {"num_logprobs": 5},
        "allowed": {"allowed_ids": column(many)},
    }
    return msgspec.structs.replace(sampling, **asked[name])


def random_prompt(key: int, length: int, pages: Int32, ready: Ready, sampling: TokenSampling) -> Prompt:
    """Draws token ids with the key as seed."""
    ids = np.random.default_rng(key).integers(0, ready.vocab_size, length, dtype=np.int32)
    return Prompt(key=key, token_ids=column(ids), num_prompt=length, pages=column(pages), sampling=sampling)
