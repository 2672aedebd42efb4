"""Requests in columns, as they are submitted: many at once, no object for any of them.

Knows arrays; knows no engine and no clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from toka_async.arrays import Int32, Int64
from toka_async.messages import TokenSampling


class RequestColumns(msgspec.Struct, frozen=True, kw_only=True, gc=False, eq=False):
    """Requests that differ in their prompts, seeds and max_tokens only.

    keys: [r], their names at the sink that is told of them. lengths: [r]. prompts: token ids [sum(lengths)].
    seeds, max_tokens: [r]. stop_id, salt: see Submit.
    """

    keys: Int64
    lengths: Int32
    prompts: Int32
    seeds: Int64
    max_tokens: Int64
    n: int
    sampling: TokenSampling
    stream: bool
    priority: int
    stop_id: int = -1
    salt: int = 0

    def __len__(self) -> int:
        return self.keys.size

    @property
    def num_tokens(self) -> Int64:
        """Tokens of each request at most, [r]: its prompt's and those of its samples."""
        num_tokens: Int64 = self.lengths + self.n * self.max_tokens
        return num_tokens

    def take(self, rows: npt.NDArray[Any]) -> RequestColumns:
        """Some of the requests: `rows` ascend."""
        if rows.size == len(self):
            return self
        return RequestColumns(
            keys=self.keys[rows],
            lengths=self.lengths[rows],
            prompts=select_parts(self.prompts, self.lengths, rows),
            seeds=self.seeds[rows],
            max_tokens=self.max_tokens[rows],
            n=self.n,
            sampling=self.sampling,
            stream=self.stream,
            priority=self.priority,
            stop_id=self.stop_id,
            salt=self.salt,
        )


def select_parts(values: npt.NDArray[Any], lengths: Int32, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The parts of some rows, by mask or ascending indices. `values` has the parts of all rows, `lengths` each."""
    mask = np.zeros(lengths.size, np.bool_)
    mask[rows] = True
    return values if mask.all() else values[np.repeat(mask, lengths)]


def concat_arrays(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One after the other, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
