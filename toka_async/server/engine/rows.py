"""Tokens of a sample as arrays, cut out of the columns of a Tokens message and put together again.

Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Float32, Int32, as_f32, as_i32
from toka_async.messages import Reason, Tokens

REASONS = {int(reason): reason for reason in Reason}


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Consecutive tokens of one sample.

    token_ids: [t]. logprobs: [t], or [0] when none were asked for. top_ids, top_logprobs: [t, k], k may be 0.
    """

    token_ids: Int32
    logprobs: Float32
    top_ids: Int32
    top_logprobs: Float32

    def part(self, start: int, end: int) -> TokenRows:
        """Tokens `start` to `end`."""
        cut = slice(start, end)
        return TokenRows(self.token_ids[cut], self.logprobs[cut], self.top_ids[cut], self.top_logprobs[cut])

    def __len__(self) -> int:
        return len(self.token_ids)


NO_ROWS = TokenRows(
    np.empty(0, np.int32), np.empty(0, np.float32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32)
)


def token_rows(token_ids: Int32) -> TokenRows:
    """Tokens without log-probs."""
    return TokenRows(token_ids, NO_ROWS.logprobs, NO_ROWS.top_ids, NO_ROWS.top_logprobs)


def join(parts: Sequence[TokenRows]) -> TokenRows:
    """The parts, none of them empty, one after the other."""
    if len(parts) < 2:
        return parts[0] if parts else NO_ROWS
    return TokenRows(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """New tokens of some samples of one request, each sample once.

    samples: [s]. counts: [s], tokens of each. token_ids: [sum(counts)], sample by sample. reasons: [s], see Reason.
    logprobs: as token_ids, or [0] when none were asked for.
    """

    samples: Int32
    counts: Int32
    token_ids: Int32
    reasons: Int32
    logprobs: Float32 = field(default_factory=lambda: NO_ROWS.logprobs)

    @property
    def tokens(self) -> TokenRows:
        """The tokens of all samples."""
        width_0 = np.empty((self.token_ids.size, 0), np.int32)
        return TokenRows(self.token_ids, self.logprobs, width_0, width_0.view(np.float32))


def split_requests(message: Tokens, wanted: Callable[[int], bool]) -> Iterator[tuple[int, TokenBlock]]:
    """The tokens of a message by request, of those wanted; a request's samples stay in their order."""
    request_ids = as_i32(message.request_ids)
    everything = TokenBlock(
        as_i32(message.samples),
        as_i32(message.counts),
        as_i32(message.token_ids),
        as_i32(message.reasons),
        as_f32(message.logprobs),
    )
    if (request_ids[1:] < request_ids[:-1]).any():
        order = np.argsort(request_ids, kind="stable")
        request_ids, everything = request_ids[order], taken(everything, order)
    cuts = np.flatnonzero(np.diff(request_ids, prepend=-1))
    ends = np.concatenate([[0], np.cumsum(everything.counts)])
    bounds = pairwise([*cuts.tolist(), request_ids.size])
    for request_id, (start, end) in zip(request_ids[cuts].tolist(), bounds, strict=True):
        if wanted(request_id):
            cut, tokens = slice(start, end), slice(ends[start], ends[end])
            yield (
                request_id,
                TokenBlock(
                    everything.samples[cut],
                    everything.counts[cut],
                    everything.token_ids[tokens],
                    everything.reasons[cut],
                    everything.logprobs[tokens],
                ),
            )


def merged(blocks: Sequence[TokenBlock]) -> TokenBlock:
    """One request's blocks, one or more, as one: samples in order, a sample's tokens in the order of their arrival."""
    if len(blocks) == 1 and (blocks[0].samples[1:] > blocks[0].samples[:-1]).all():
        return blocks[0]
    everything = TokenBlock(
        np.concatenate([block.samples for block in blocks]),
        np.concatenate([block.counts for block in blocks]),
        np.concatenate([block.token_ids for block in blocks]),
        np.concatenate([block.reasons for block in blocks]),
        np.concatenate([block.logprobs for block in blocks]),
    )
    everything = taken(everything, np.argsort(everything.samples, kind="stable"))
    firsts = np.flatnonzero(np.diff(everything.samples, prepend=-1))
    return TokenBlock(
        everything.samples[firsts],
        np.add.reduceat(everything.counts, firsts),
        everything.token_ids,
        np.maximum.reduceat(everything.reasons, firsts),
        everything.logprobs,
    )


def taken(block: TokenBlock, order: npt.NDArray[np.intp]) -> TokenBlock:
    """The samples in another order, with their tokens."""
    counts = block.counts[order]
    if block.token_ids.size == block.counts.size and (block.counts == 1).all():
        places = order
    else:
        starts = (np.cumsum(block.counts) - block.counts)[order]
        shifts = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        places = shifts + np.arange(shifts.size)
    logprobs = block.logprobs[places] if block.logprobs.size else block.logprobs
    return TokenBlock(block.samples[order], counts, block.token_ids[places], block.reasons[order], logprobs)


def split(message: Tokens, wanted: Callable[[int], bool]) -> Iterator[tuple[int, int, TokenRows, Reason]]:
    """The rows of a message that are of wanted requests: request id, sample, tokens, reason."""
    counts = as_i32(message.counts)
    ends = np.cumsum(counts)
    width = max(message.num_logprobs, 0)
    token_ids = as_i32(message.token_ids)
    everything = TokenRows(
        token_ids,
        as_f32(message.logprobs),
        as_i32(message.top_ids).reshape(len(token_ids), width),
        as_f32(message.top_logprobs).reshape(len(token_ids), width),
    )
    columns = (as_i32(message.request_ids), as_i32(message.samples), ends - counts, ends, as_i32(message.reasons))
    for request_id, sample, start, end, reason in zip(*(values.tolist() for values in columns), strict=True):
        if wanted(request_id):  # the parts are what costs
            yield request_id, sample, everything.part(start, end), REASONS[reason]
