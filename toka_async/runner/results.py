"""A step's results as one message: all tensors come to the host in one copy, which nobody waits for before it is due.

Knows messages and log-probs; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import EMPTY, Float32, Int32, column
from toka_async.messages import ChunkLogprobs, StepDone
from toka_async.model.logprobs import Logprobs
from toka_async.runner.clock import StepClock, StepSpan
from toka_async.runner.copies import Download
from toka_async.runner.prompt_logprobs import AskedChunk
from toka_async.runner.samples import Samples, TopLogprobs


class Launched:
    """A step that the device has been told to compute; `collect` waits for it, in the order of launching."""

    def __init__(
        self,
        step_id: int,
        samples: Samples | None,
        asked: Sequence[AskedChunk],
        of_chunks: Logprobs | None,
        clock: StepClock,
        span: StepSpan,
        num_compiles: int,
    ) -> None:
        self._step_id = step_id
        self._samples = samples
        self._asked = asked
        self._clock = clock
        self._num_compiles = num_compiles
        tensors = [] if samples is None else samples.tensors()
        self._num_own = len(tensors)
        self._span = clock.end(span)
        self._download = Download([*tensors, *_tensors(of_chunks)], clock.copies)

    def collect(self) -> StepDone:
        """What the step sampled, and the log-probs of prompts."""
        arrays = self._download.arrays()
        seconds, waited = self._clock.seconds(self._span)
        own, of_chunks = arrays[: self._num_own], arrays[self._num_own :]
        done = StepDone(
            step_id=self._step_id,
            token_ids=column(own[0]) if own else EMPTY,
            prompts=_chunks(self._asked, *of_chunks) if of_chunks else (),
            seconds=seconds,
            waited=waited,
            num_compiles=self._num_compiles,
        )
        if len(own) < 2:
            return done
        assert self._samples is not None
        done = msgspec.structs.replace(done, logprobs=column(own[1]))
        return done if self._samples.top is None else _with_top(done, self._samples.top, own[2], own[3])


def _tensors(logprobs: Logprobs | None) -> list[Tensor]:
    return [] if logprobs is None else [logprobs.chosen, logprobs.top_ids.to(torch.int32), logprobs.top]


def _with_top(done: StepDone, top: TopLogprobs, ids: Int32, values: Float32) -> StepDone:
    """Arrays of the rows that ask for likeliest tokens, [m, k]."""
    counts = np.minimum(top.counts, values.shape[1])
    wanted = np.arange(values.shape[1]) < counts[:, None]
    has_top = counts > 0
    return msgspec.structs.replace(
        done,
        top_rows=column(top.rows[has_top].astype(np.int32)),
        top_counts=column(counts[has_top]),
        top_ids=column(ids[wanted]),
        top_logprobs=column(values[wanted]),
    )


def _chunks(asked: Sequence[AskedChunk], chosen: Float32, top_ids: Int32, top: Float32) -> tuple[ChunkLogprobs, ...]:
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
                num_top=num_top,
                top_ids=column(top_ids[part, :num_top]),
                top_logprobs=column(top[part, :num_top]),
            )
        )
        first = part.stop
    return tuple(messages)
