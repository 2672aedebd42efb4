"""First steps, so that the first request does not pay for what a process does once (thread pools, kernels, caches).

Knows messages; leaves the runner without rows.
"""

from __future__ import annotations

import numpy as np

from toka_async.arrays import column, i32_column
from toka_async.messages import Prompt, Sampling, Step
from toka_async.runner.runner import Runner

_PROMPT_TOKENS = 8
_DECODE_STEPS = 3


def warm_up(runner: Runner) -> None:
    """A prompt and some tokens after it, in the first pages; what they held is lost."""
    ready = runner.ready
    room = min(ready.num_pages * ready.page_size, ready.max_context)
    num_tokens = min(_PROMPT_TOKENS, room - _DECODE_STEPS)
    if num_tokens < 1:
        return
    num_pages = -(-(num_tokens + _DECODE_STEPS) // ready.page_size)
    slot = i32_column([0])
    prompt = Prompt(
        key=0,
        token_ids=column(np.zeros(num_tokens, dtype=np.int32)),
        num_prompt=num_tokens,
        pages=i32_column(range(num_pages)),
        sampling=Sampling(top_p=0.9),
    )
    first = Step(
        step_id=0,
        prompts=(prompt,),
        admit_slots=slot,
        admit_keys=i32_column([0]),
        admit_starts=i32_column([0]),
        admit_seeds=column(np.zeros(1, dtype=np.int64)),
        chunk_slots=slot,
        chunk_lengths=i32_column([num_tokens]),
        chunk_samples=column(np.ones(1, dtype=np.bool_)),
    )
    runner.run(first)
    for index in range(_DECODE_STEPS):
        runner.run(Step(step_id=0, joined=slot if index == 0 else i32_column([])))
    runner.run(Step(step_id=0, freed=slot, dropped_prompts=i32_column([0])))
