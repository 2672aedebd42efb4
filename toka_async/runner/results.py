"""A step's results as one message: all tensors come to the host in one copy, which nobody waits for before it is due.

Knows messages and log-probs; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toka_async.arrays import EMPTY, Float32, Int32, Int64, column
from toka_async.messages import ChunkLogprobs, StepDone
from toka_async.model.logprobs import Logprobs
from toka_async.runner.clock import StepClock, StepSpan
from toka_async.runner.copies import Download
from toka_async.runner.prompt_logprobs import AskedChunk
from toka_async.runner.samples import Draws, TopLogprobs


class PartResults:
    """What a micro-batch samples, on its way to the host from the making of this on.

    places: int64 [s], of its samples among the step's; None: they are all of them.
    """

    def __init__(
        self,
        samples: Draws | None,
        asked: Sequence[AskedChunk] = (),
        of_chunks: Logprobs | None = None,
        places: Int64 | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.places = places
        self.top = None if samples is None else samples.top
        self._asked = asked
        tensors = [] if samples is None else samples.tensors()
        self._num_own = len(tensors)
        self._download = Download([*tensors, *_tensors(of_chunks)], stream)

    def collect(self) -> tuple[list[npt.NDArray[Any]], tuple[ChunkLogprobs, ...]]:
        """Waits: token ids, then log-probs, then likeliest ids and theirs, as far as there are any; and of prompts."""
        arrays = self._download.arrays()
        own, of_chunks = arrays[: self._num_own], arrays[self._num_own :]
        return own, _chunks(self._asked, *of_chunks) if of_chunks else ()


class LaunchedStep:
    """A step that the device has been told to compute, in parts; `collect` waits for it, in the order of launching."""

    def __init__(
        self, step_id: int, parts: Sequence[PartResults], clock: StepClock, span: StepSpan, num_compiles: int
    ) -> None:
        self._step_id = step_id
        self._parts = parts
        self._clock = clock
        self._num_compiles = num_compiles
        self._span = clock.end(span)

    def collect(self) -> StepDone:
        """What the step sampled, and the log-probs of prompts."""
        collected = [part.collect() for part in self._parts]
        seconds, waited = self._clock.seconds(self._span)
        done = StepDone(
            step_id=self._step_id,
            token_ids=EMPTY,
            prompts=tuple(chunk for _, chunks in collected for chunk in chunks),
            seconds=seconds,
            waited=waited,
            stalled=self._clock.stall_seconds(self._span),
            num_compiles=self._num_compiles,
        )
        sampled = [(part, own) for part, (own, _) in zip(self._parts, collected, strict=True) if own]
        if not sampled:
            return done
        places = [part.places for part, _ in sampled]
        tokens = _in_order([own[0] for _, own in sampled], places)
        done = msgspec.structs.replace(done, token_ids=column(tokens))
        if all(len(own) < 2 for _, own in sampled):
            return done
        chosen = [own[1] if len(own) > 1 else np.zeros(own[0].size, np.float32) for _, own in sampled]
        done = msgspec.structs.replace(done, logprobs=column(_in_order(chosen, places)))
        tops = [_top_of(part, part.top, own[2], own[3]) for part, own in sampled if part.top is not None]
        return _with_top(done, tops) if tops else done


def _in_order(parts: Sequence[npt.NDArray[Any]], places: Sequence[Int64 | None]) -> npt.NDArray[Any]:
    """The parts' values in the step's order."""
    if places[0] is None:
        (values,) = parts
        return values
    ordered = np.empty(sum(part.size for part in parts), parts[0].dtype)
    for part, at in zip(parts, places, strict=True):
        ordered[at] = part
    return ordered


def _tensors(logprobs: Logprobs | None) -> list[Tensor]:
    """The tensors of prompts' log-probs, whose tokens have ranks."""
    if logprobs is None:
        return []
    assert logprobs.ranks is not None
    return [logprobs.chosen, logprobs.top_ids.to(torch.int32), logprobs.top, logprobs.ranks]


@dataclass(slots=True, frozen=True)
class _Top:
    """Rows of the step, int64 [m], how many likeliest ids each has, int32 [m], and these, row after row."""

    rows: Int64
    counts: Int32
    ids: Int32
    values: Float32


def _top_of(part: PartResults, top: TopLogprobs, ids: Int32, values: Float32) -> _Top:
    """Arrays of the rows that ask for likeliest tokens, [m, k]."""
    counts = np.minimum(top.counts, values.shape[1])
    wanted = np.arange(values.shape[1]) < counts[:, None]
    has_top = counts > 0
    rows = top.rows[has_top] if part.places is None else part.places[top.rows[has_top]]
    return _Top(rows, counts[has_top], ids[wanted], values[wanted])


def _with_top(done: StepDone, tops: Sequence[_Top]) -> StepDone:
    """The rows in the step's order."""
    rows, counts, ids, values = (np.concatenate([getattr(top, name) for top in tops]) for name in _Top.__slots__)
    order, each = np.argsort(rows, kind="stable"), np.argsort(np.repeat(rows, counts), kind="stable")
    return msgspec.structs.replace(
        done,
        top_rows=column(rows[order].astype(np.int32)),
        top_counts=column(counts[order]),
        top_ids=column(ids[each]),
        top_logprobs=column(values[each]),
    )


def _chunks(
    asked: Sequence[AskedChunk], chosen: Float32, top_ids: Int32, top: Float32, ranks: Int32
) -> tuple[ChunkLogprobs, ...]:
    """Arrays of all chunks, one after the other, cut into messages."""
    messages = []
    first = 0
    for chunk in asked:
        part = slice(first, first + chunk.next_ids.size)
        num_top = min(chunk.num_top, top.shape[1])
        messages.append(
            ChunkLogprobs(
                slot=chunk.slot,
                start=chunk.start,
                logprobs=column(chosen[part]),
                ranks=column(ranks[part]),
                num_top=num_top,
                top_ids=column(top_ids[part, :num_top]),
                top_logprobs=column(top[part, :num_top]),
            )
        )
        first = part.stop
    return tuple(messages)
