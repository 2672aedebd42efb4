"""Tokens of a sample as arrays, cut out of the columns of a Tokens message and put together again.

Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from toka_async.arrays import Float32, Int32, as_f32, as_i32
from toka_async.messages import Reason, Tokens

REASONS = {int(reason): reason for reason in Reason}


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive tokens of one sample.

    token_ids: [t]. logprobs: [t], or [0] when none were asked for. top_ids, top_logprobs: [t, k], k may be 0.
    """

    token_ids: Int32
    logprobs: Float32
    top_ids: Int32
    top_logprobs: Float32

    def part(self, start: int, end: int) -> Rows:
        """Tokens `start` to `end`."""
        cut = slice(start, end)
        return Rows(self.token_ids[cut], self.logprobs[cut], self.top_ids[cut], self.top_logprobs[cut])

    def __len__(self) -> int:
        return len(self.token_ids)


NO_ROWS = Rows(np.empty(0, np.int32), np.empty(0, np.float32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))


def join(parts: Sequence[Rows]) -> Rows:
    """The parts, none of them empty, one after the other."""
    if len(parts) < 2:
        return parts[0] if parts else NO_ROWS
    return Rows(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
    )


def split(message: Tokens) -> Iterator[tuple[int, int, Rows, Reason]]:
    """The rows of a message: request id, sample, tokens, reason."""
    counts = as_i32(message.counts)
    ends = np.cumsum(counts)
    width = max(message.num_logprobs, 0)
    token_ids = as_i32(message.token_ids)
    everything = Rows(
        token_ids,
        as_f32(message.logprobs),
        as_i32(message.top_ids).reshape(len(token_ids), width),
        as_f32(message.top_logprobs).reshape(len(token_ids), width),
    )
    columns = (as_i32(message.request_ids), as_i32(message.samples), ends - counts, ends, as_i32(message.reasons))
    for request_id, sample, start, end, reason in zip(*(values.tolist() for values in columns), strict=True):
        yield request_id, sample, everything.part(start, end), REASONS[reason]
