"""New tokens of samples in columns, as a Tokens message brings them: cut, reordered and put together again.

Knows nothing of who waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from toka_async.arrays import Float32, Int32, Int64, as_f32, as_i32
from toka_async.messages import Reason, Tokens

REASONS = {int(reason): reason for reason in Reason}
_VERSIONS = 7  # of a block's rows
LONG_ROWS = 16  # tokens of a row from which on copying row by row is faster than token by token
NO_INTEGERS: Int32 = np.empty(0, np.int32)
MOST_LISTED = 20  # likeliest tokens at a place that become a list
NO_LOGPROBS = (np.empty(0, np.float32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))

Score = tuple[float, list[int], list[float]]  # of a token: its log-prob, the likeliest tokens and theirs


class TokenRows(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Tokens one after the other.

    token_ids: [t]. logprobs: [t], or [0] when none were asked for. top_ids, top_logprobs: [t, k]; k may be 0, and
    without log-probs they are [0, 0]. kept, masses: [t], how many tokens the filters kept and their share of the
    distribution; [0] when not asked for. versions: [t], numbers of `WeightVersions`; [0] where nobody needs them for
    each token.
    """

    token_ids: Int32
    logprobs: Float32 = NO_LOGPROBS[0]
    top_ids: Int32 = NO_LOGPROBS[1]
    top_logprobs: Float32 = NO_LOGPROBS[2]
    kept: Int32 = NO_INTEGERS
    masses: Float32 = NO_LOGPROBS[0]
    versions: Int32 = NO_INTEGERS

    @property
    def can_be_listed(self) -> bool:
        """Whether ids and scores are all that there is, and not too much for lists."""
        return not (self.versions.size or self.kept.size) and self.top_ids.shape[1] <= MOST_LISTED

    def list_scores(self) -> list[Score]:
        """The scores of the tokens; none where no log-probs were asked for."""
        columns = self.logprobs.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist()
        return list(zip(*columns, strict=True)) if self.logprobs.size else []

    def part(self, start: int, end: int) -> TokenRows:
        """Tokens `start` to `end`."""
        return self.take(slice(start, end))

    def take(self, places: slice | npt.NDArray[Any]) -> TokenRows:
        """The tokens at some places, by slice, mask or index."""
        versions = self.versions[places] if self.versions.size else self.versions
        if not self.logprobs.size:
            return TokenRows(self.token_ids[places], versions=versions)
        scores = self.logprobs[places], self.top_ids[places], self.top_logprobs[places]
        if not self.kept.size:
            return TokenRows(self.token_ids[places], *scores, versions=versions)
        return TokenRows(self.token_ids[places], *scores, self.kept[places], self.masses[places], versions)

    def __len__(self) -> int:
        return len(self.token_ids)


def rows_of_lists(token_ids: list[int], scores: list[Score]) -> TokenRows:
    """The tokens of these ids and scores, one for each id or none."""
    ids = np.array(token_ids, np.int32)
    if not scores:
        return TokenRows(ids)
    logprobs, top_ids, top_logprobs = zip(*scores, strict=True)
    tops = np.array(top_ids, np.int32), np.array(top_logprobs, np.float32)
    return TokenRows(ids, np.array(logprobs, np.float32), *tops)


NO_ROWS = TokenRows(np.empty(0, np.int32))


def concat_rows(parts: Sequence[TokenRows]) -> TokenRows:
    """The parts one after the other; all have the same columns, of the same width."""
    parts = [part for part in parts if len(part)]
    if len(parts) < 2:
        return parts[0] if parts else NO_ROWS
    first = parts[0]

    def join(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    scores = ("logprobs", "top_ids", "top_logprobs", *(("kept", "masses") if first.kept.size else ()))
    names = (*(scores if first.logprobs.size else ()), *(("versions",) if first.versions.size else ()))
    return TokenRows(token_ids=join("token_ids"), **{name: join(name) for name in names})


class TokenBlock(msgspec.Struct, frozen=True, gc=False, eq=False):
    """New tokens of some samples, one row each.

    rows: [8, r], keys, samples, counts, reasons, request ids, cached, is_last and versions, each as below; one array,
    so that a part of all of them is one slice. tokens: those of the rows, one row after the other. num_logprobs: see
    TokenSampling.
    """

    rows: Int64
    tokens: TokenRows
    num_logprobs: int = -1

    @property
    def keys(self) -> Int64:
        """The requests' names at their sink, [r]."""
        return self._row(0)

    @property
    def samples(self) -> Int64:
        """[r]"""
        return self._row(1)

    @property
    def counts(self) -> Int64:
        """Tokens of each row, [r]."""
        return self._row(2)

    @property
    def reasons(self) -> Int64:
        """Why the samples have ended, if they have, [r]: see Reason."""
        return self._row(3)

    @property
    def request_ids(self) -> Int64:
        """The engine's, [r]."""
        return self._row(4)

    @property
    def cached(self) -> Int64:
        """Prompt tokens of the requests that were found in the cache, [r]."""
        return self._row(5)

    @property
    def is_last(self) -> Int64:
        """1 where a sample ends with the row and its request with the block, else 0, [r]."""
        return self._row(6)

    @property
    def versions(self) -> Int64:
        """Numbers of the weights that generated the rows' tokens, as far as the tokens have none of their own, [r]."""
        return self._row(_VERSIONS)

    def with_versions(self) -> TokenBlock:
        """The same, with the version of each token."""
        if self.tokens.versions.size or not len(self.tokens):
            return self
        versions = np.repeat(self.versions.astype(np.int32), self.counts)
        return TokenBlock(self.rows, msgspec.structs.replace(self.tokens, versions=versions), self.num_logprobs)

    def _row(self, number: int) -> Int64:
        values: Int64 = self.rows[number]
        return values

    def __len__(self) -> int:
        return int(self.rows.shape[1])

    def part(self, start: int, end: int) -> TokenBlock:
        """Rows `start` to `end`, with their tokens."""
        before = int(self.counts[:start].sum())
        return self.cut(start, end, before, before + int(self.counts[start:end].sum()))

    def cut(self, start: int, end: int, first_token: int, end_token: int) -> TokenBlock:
        """As `part`, for a caller who knows where the rows' tokens are."""
        return TokenBlock(self.rows[:, start:end], self.tokens.part(first_token, end_token), self.num_logprobs)

    def list_rows(self, places: npt.NDArray[np.intp]) -> Iterator[tuple[list[int], list[Score]]]:
        """The ids and scores of the rows at some places, in their order."""
        if not places.size:
            return
        rows = self if places.size == len(self) else self.take(places)
        ids, scores, start = rows.tokens.token_ids.tolist(), rows.tokens.list_scores(), 0
        for count in rows.counts.tolist():
            yield ids[start : start + count], scores[start : start + count]
            start += count

    def take(self, places: npt.NDArray[np.intp]) -> TokenBlock:
        """The rows at some places, in their order, with their tokens."""
        rows = self.rows[:, places]
        if len(self.tokens) == len(self) and (self.counts == 1).all():
            return TokenBlock(rows, self.tokens.take(places), self.num_logprobs)
        starts, counts = (np.cumsum(self.counts) - self.counts)[places], rows[2]
        if len(self.tokens) > LONG_ROWS * len(self):
            bounds = zip(starts.tolist(), (starts + counts).tolist(), strict=True)
            tokens = concat_rows([self.tokens.part(start, end) for start, end in bounds])
        else:
            shifts = np.repeat(starts - (np.cumsum(counts) - counts), counts)
            tokens = self.tokens.take(shifts + np.arange(shifts.size))
        return TokenBlock(rows, tokens, self.num_logprobs)


def read_rows(message: Tokens) -> TokenRows:
    """The tokens of a message, without versions."""
    token_ids = as_i32(message.token_ids)
    if message.num_logprobs < 0:
        return TokenRows(token_ids)
    shape = (token_ids.size, message.num_logprobs)
    top_ids, top_logprobs = as_i32(message.top_ids).reshape(shape), as_f32(message.top_logprobs).reshape(shape)
    return TokenRows(
        token_ids, as_f32(message.logprobs), top_ids, top_logprobs, as_i32(message.kept), as_f32(message.masses)
    )


def read_versions(message: Tokens, numbers: Sequence[int]) -> Int32:
    """The version of each token of a message; `numbers`: of its names."""
    counts = as_i32(message.counts)
    versions: Int32 = np.full(int(counts.sum()), numbers[0], np.int32)
    starts = np.cumsum(counts) - counts
    begins: dict[int, int] = {}
    for row, end, number in as_i32(message.spans).reshape(-1, 3).tolist():
        versions[starts[row] + begins.get(row, 0) : starts[row] + end] = numbers[number]
        begins[row] = end
    return versions


def match_versions(blocks: Sequence[TokenBlock]) -> Sequence[TokenBlock]:
    """The same blocks, with the version of each token unless all are of one."""
    version = blocks[0].rows.item(_VERSIONS, 0)
    if all(not block.tokens.versions.size and _is_of(block, version) for block in blocks):
        return blocks
    return [block.with_versions() for block in blocks]


def _is_of(block: TokenBlock, version: int) -> bool:
    """Whether all rows are of one version. A row alone is compared without an array: streams join many of these."""
    if len(block) == 1:
        return bool(block.rows.item(_VERSIONS, 0) == version)
    return bool((block.versions == version).all())


def merge_blocks(blocks: Sequence[TokenBlock], n: int) -> TokenBlock:
    """One or more blocks as one that has each sample once, in the order of keys and samples.

    A sample's tokens are in the order of their arrival. `n` is larger than any sample's number.
    """
    if len(blocks) == 1 and is_sorted(blocks[0], n):
        return blocks[0]
    blocks = match_versions(blocks)
    rows, tokens = np.concatenate([block.rows for block in blocks], 1), concat_rows([block.tokens for block in blocks])
    places = rows[0] * n + rows[1]
    order = np.argsort(places, kind="stable")
    block = TokenBlock(rows, tokens, blocks[0].num_logprobs).take(order)
    firsts = np.flatnonzero(np.diff(places[order], prepend=-1))
    rows = np.maximum.reduceat(block.rows, firsts, axis=1)
    rows[2] = np.add.reduceat(block.counts, firsts)
    return TokenBlock(rows, block.tokens, block.num_logprobs)


def join_sample(blocks: Sequence[TokenBlock]) -> TokenBlock:
    """Blocks of one and the same sample, a row each, as one row."""
    if len(blocks) == 1:
        return blocks[0]
    blocks = match_versions(blocks)
    tokens, rows = concat_rows([block.tokens for block in blocks]), blocks[-1].rows.copy()
    rows[2] = len(tokens)
    return TokenBlock(rows, tokens, blocks[0].num_logprobs)


def is_sorted(block: TokenBlock, n: int) -> bool:
    """Whether each sample is there once, in the order of keys and samples."""
    if len(block) == 1:
        return True
    places = block.keys * n + block.samples
    return bool((places[1:] > places[:-1]).all())
