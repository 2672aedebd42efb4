"""The columns of a submission, checked: which requests they hold, and what is wrong with some of them.

Knows the protocol's columns; knows no engine and no client.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Bool, Int32, Int64
from toka_async.openai.errors import ApiError
from toka_async.openai.generation import RequestLimits, token_budget
from toka_async.openai.prompts import check_vocabulary
from toka_async.protocol import Columns, ProtocolError
from toka_async.server.engine.request_columns import select_parts
from toka_async.server.limits.jobs import OverloadedError


@dataclass(frozen=True, slots=True)
class Submitted:
    """Prompts of requests: token ids, or bytes of text, one prompt after the other in `data`.

    ids, seeds: [r]. lengths: [r], in items of `data`.
    """

    ids: Int64
    lengths: Int32
    data: npt.NDArray[np.generic]
    seeds: Int64

    def __len__(self) -> int:
        return self.ids.size

    @property
    def is_text(self) -> bool:
        return self.data.dtype == np.uint8

    def chosen(self, mask: Bool) -> Submitted:
        """Some of them."""
        if mask.all():
            return self
        data = select_parts(self.data, self.lengths, mask)
        return Submitted(self.ids[mask], self.lengths[mask], data, self.seeds[mask])

    def prompts(self) -> Iterator[npt.NDArray[np.generic]]:
        """One by one."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        for start, end in zip((ends - self.lengths).tolist(), ends.tolist(), strict=True):
            yield self.data[start:end]


class TextBudget:
    """Bytes of texts that are being tokenized, of all clients together. most: at once, or one message with more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises OverloadedError: there is no room for so many now."""
        if self._num_bytes and self._num_bytes + num_bytes > self._most:
            raise OverloadedError("too many texts wait to be tokenized")
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes


def submitted(columns: Columns, random: np.random.Generator) -> Submitted:
    """Of a message's columns; `random` seeds requests that have no seed. Raises ProtocolError that names the column."""
    for name in columns:
        if name not in ("ids", "lengths", "prompts", "texts", "seeds"):
            raise ProtocolError(f"a submission has no column {name!r}", name)
    for name in ("ids", "lengths"):
        if name not in columns:
            raise ProtocolError(f"the column {name!r} is missing", name)
    if ("prompts" in columns) == ("texts" in columns):
        raise ProtocolError("a submission has either prompts or texts", "prompts")
    ids, lengths = columns["ids"], columns["lengths"]
    name = "prompts" if "prompts" in columns else "texts"
    seeds = columns["seeds"] if "seeds" in columns else random.integers(0, 2**63 - 1, ids.size)
    for column_name, size in (("lengths", lengths.size), ("seeds", seeds.size)):
        if size != ids.size:
            raise ProtocolError(f"{ids.size} ids, but {size} {column_name}", column_name)
    if ids.size and int(ids.min()) < 0:
        raise ProtocolError("an id is negative", "ids")
    if lengths.size and int(lengths.min()) < 0:
        raise ProtocolError("a length is negative", "lengths")
    if (total := int(lengths.sum(dtype=np.int64))) != columns[name].size:
        raise ProtocolError(f"the lengths add up to {total}, there are {columns[name].size}", name)
    return Submitted(ids, lengths, columns[name], seeds)


def faults(requests: Submitted, limits: RequestLimits, max_tokens: int) -> dict[int, ApiError]:
    """Rows that cannot be run, and why; prompts are token ids."""
    found: dict[int, ApiError] = {}
    room = min(limits.max_context, limits.cache_tokens)
    bad = (requests.lengths < 1) | (requests.lengths.astype(np.int64) + max_tokens > room)
    ids = as_tokens(requests)
    if ids.size and (int(ids.max()) >= limits.vocab_size or int(ids.min()) < 0):
        places = np.flatnonzero((ids >= limits.vocab_size) | (ids < 0))
        bad[np.searchsorted(np.cumsum(requests.lengths, dtype=np.int64), places, side="right")] = True
    if not bad.any():
        return found
    ends = np.cumsum(requests.lengths, dtype=np.int64)
    for row in np.flatnonzero(bad).tolist():
        prompt = ids[ends[row] - requests.lengths[row] : ends[row]]
        try:
            check_prompt(prompt, limits, max_tokens)
        except ApiError as error:
            found[row] = error
    return found


def as_tokens(requests: Submitted) -> Int32:
    """The token ids of all prompts, one after the other."""
    assert not requests.is_text
    return requests.data.astype(np.int32, copy=False)


def check_prompt(prompt: Int32, limits: RequestLimits, max_tokens: int) -> None:
    """Raises ApiError (400)."""
    if not prompt.size:
        raise ApiError(400, "'prompt' is empty: it has no tokens", param="prompt")
    if int(prompt.min()) < 0:
        raise ApiError(400, "'prompt' has a token id out of range", param="prompt")
    check_vocabulary(prompt, limits.vocab_size)
    token_budget(limits, len(prompt), max_tokens, "prompt")
