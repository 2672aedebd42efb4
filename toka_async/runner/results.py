"""A step's results as one message: all tensors come to the host in one copy.

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
from toka_async.runner.copies import download
from toka_async.runner.prompt_logprobs import AskedChunk
from toka_async.runner.sampler import Samples


def step_done(
    step_id: int, samples: Samples | None, asked: Sequence[AskedChunk], of_chunks: Logprobs | None
) -> StepDone:
    """What a step sampled, and the log-probs of the `asked` chunks' following tokens; `seconds` is left at 0."""
    tensors = [] if samples is None else [samples.token_ids.to(torch.int32), *_tensors(samples.logprobs)]
    arrays = download([*tensors, *_tensors(of_chunks)])
    prompts = () if of_chunks is None else _chunks(asked, *arrays[len(tensors) :])
    if samples is None:
        return StepDone(step_id=step_id, token_ids=EMPTY, prompts=prompts)
    done = StepDone(step_id=step_id, token_ids=column(arrays[0]), prompts=prompts)
    if samples.logprobs is None:
        return done
    return _with_logprobs(done, samples, arrays[0].size, *arrays[1:4])


def _tensors(logprobs: Logprobs | None) -> list[Tensor]:
    return [] if logprobs is None else [logprobs.chosen, logprobs.top_ids.to(torch.int32), logprobs.top]


def _with_logprobs(
    done: StepDone, samples: Samples, num_rows: int, chosen: Float32, top_ids: Int32, top: Float32
) -> StepDone:
    """Arrays of the rows that ask, [m] and [m, k]; rows that do not ask get 0."""
    logprobs = np.zeros(num_rows, dtype=np.float32)
    logprobs[samples.asked] = chosen
    counts = np.minimum(samples.num_top, top.shape[1])
    wanted = np.arange(top.shape[1]) < counts[:, None]
    has_top = counts > 0
    return msgspec.structs.replace(
        done,
        logprobs=column(logprobs),
        top_rows=column(samples.asked[has_top].astype(np.int32)),
        top_counts=column(counts[has_top]),
        top_ids=column(top_ids[wanted]),
        top_logprobs=column(top[wanted]),
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
