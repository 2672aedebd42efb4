"""Requests submitted in columns, and what comes back of them: many rows at once, no object for any of them.

Knows arrays; knows no engine and no clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Bool, Float32, Int32, Int64, as_f32, as_i32
from toka_async.messages import SamplingParams, Tokens

Places = npt.NDArray[Any]  # indices or a mask


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectJobs:
    """Requests that differ in their prompts and seeds only.

    client_ids: [r]. lengths: [r]. prompts: token ids [sum(lengths)]. seeds: [r].
    salt: see Submit.
    """

    client_ids: Int64
    lengths: Int32
    prompts: Int32
    seeds: Int64
    n: int
    max_tokens: int
    sampling: SamplingParams
    stream: bool
    priority: int
    salt: int

    def __len__(self) -> int:
        return self.client_ids.size


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectRows:
    """New tokens of samples, one row each: see `protocol.Results`. num_logprobs: -1 for none.

    keys: whose rows they are, [r]: the engine's request ids at first, then the client's.
    """

    keys: Int64
    samples: Int32
    counts: Int32
    reasons: Int32
    token_ids: Int32
    num_logprobs: int
    logprobs: Float32
    top_ids: Int32
    top_logprobs: Float32

    def chosen(self, mask: Bool) -> DirectRows:
        """Some of the rows, with their tokens."""
        if mask.all():
            return self
        tokens, width = np.repeat(mask, self.counts), max(self.num_logprobs, 0)
        shape = (-1, width) if width else (0, 0)
        return DirectRows(
            keys=self.keys[mask],
            samples=self.samples[mask],
            counts=self.counts[mask],
            reasons=self.reasons[mask],
            token_ids=self.token_ids[tokens],
            num_logprobs=self.num_logprobs,
            logprobs=self.logprobs[tokens] if self.logprobs.size else self.logprobs,
            top_ids=self.top_ids.reshape(shape)[tokens].reshape(-1) if width else self.top_ids,
            top_logprobs=self.top_logprobs.reshape(shape)[tokens].reshape(-1) if width else self.top_logprobs,
        )

    def message(self) -> Tokens:
        """As it came."""
        columns = {each.name: getattr(self, each.name) for each in fields(self)}
        keys = columns.pop("keys").astype(np.int32)
        num_logprobs = columns.pop("num_logprobs")
        return Tokens(
            request_ids=keys.data.cast("B"),
            num_logprobs=num_logprobs,
            **{name: np.ascontiguousarray(values).data.cast("B") for name, values in columns.items()},
        )


def make_step_rows(message: Tokens) -> DirectRows:
    """The rows of a message."""
    return DirectRows(
        keys=as_i32(message.request_ids).astype(np.int64),
        samples=as_i32(message.samples),
        counts=as_i32(message.counts),
        reasons=as_i32(message.reasons),
        token_ids=as_i32(message.token_ids),
        num_logprobs=message.num_logprobs,
        logprobs=as_f32(message.logprobs),
        top_ids=as_i32(message.top_ids),
        top_logprobs=as_f32(message.top_logprobs),
    )


def parts_of(values: npt.NDArray[Any], lengths: Int32, rows: Places) -> npt.NDArray[Any]:
    """The parts of `values` (one after the other, so long each) of some rows, by mask or ascending indices."""
    mask = np.zeros(lengths.size, np.bool_)
    mask[rows] = True
    return values if mask.all() else values[np.repeat(mask, lengths)]


def joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One after the other, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
