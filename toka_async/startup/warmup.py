"""Computes first steps, so that no request pays for what happens once: thread pools, kernels, captured graphs.

Every kind of step is computed: one row and all rows, one token and many, with and without shared prefixes, all ways to
sample. On a GPU, where this loads kernels, of layers that launch the same ones few are computed. Afterwards nothing is
compiled any more, and the runner has no rows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import msgspec
import numpy as np
import torch

from toka_async.arrays import column, i32_column
from toka_async.messages import Ready, TokenSampling
from toka_async.runner.micro_batches import LEAST_TOKENS
from toka_async.runner.runner import Runner
from toka_async.startup.progress import StartupProgress
from toka_async.startup.synthetic import GREEDY, SyntheticRows

_DECODE_STEPS = 3
_PROMPT_TOKENS = 8
# Parameters by what samples them: kernels that only read logits, kernels that edit them too, and plain torch.
PLAIN = (
    GREEDY,
    TokenSampling(temperature=0.6),
    TokenSampling(temperature=0.6, top_p=0.9),
    TokenSampling(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
    TokenSampling(min_p=0.1, num_logprobs=0),
)
FULL = (
    TokenSampling(presence_penalty=0.5, frequency_penalty=0.5, num_logprobs=5, num_prompt_logprobs=5),
    TokenSampling(top_k=100, top_p=0.9, repetition_penalty=1.1),
    TokenSampling(
        bias_ids=i32_column([0]),
        bias_values=column(np.ones(1, np.float32)),
        min_tokens=2,
        end_ids=i32_column([0]),
    ),
)
TORCH = (
    TokenSampling(allowed_ids=i32_column([0])),
    msgspec.structs.replace(FULL[0], allowed_ids=i32_column([0]), num_prompt_logprobs=-1),
    msgspec.structs.replace(FULL[1], allowed_ids=i32_column([0])),
    msgspec.structs.replace(FULL[2], allowed_ids=i32_column([0])),
)


def warm_up(
    runner: Runner, stages: StartupProgress, num_parts: int = 1, capture: Callable[[], None] | None = None
) -> None:
    """Computes steps of all kinds. num_parts: micro-batches of a step. capture: captures decoding steps, if any are."""
    on_gpu = runner.decode is not None
    with stages.stage("warm-up", "computing steps"), runner.model.rehearse() if on_gpu else nullcontext():
        large = list_prompt_loads(runner.ready, num_parts) if on_gpu else []
        num_decode = _DECODE_STEPS if capture is None else 1  # graphs replay the further ones below
        loads = list_row_loads(runner.ready, num_parts, num_decode) if on_gpu else list_cpu_loads(runner.ready)
        if runner.ready.async_tp_min_tokens:
            large.append(make_largest_load(runner.ready))
        for number, load in enumerate([*loads, *large]):
            load(runner)
            stages.show(number + 1, len(loads) + len(large), "loads computed")
    if capture is not None:
        with stages.stage("graphs", "capturing"):
            torch.cuda.empty_cache()  # graphs have memory of their own, and a capture cannot free what steps keep
            capture()
            torch.cuda.empty_cache()  # what was computed before each capture, on the captures' stream
            runner.launch_graphs()
            for load in list_row_loads(runner.ready, num_parts):  # what is around replays; large steps have none
                load(runner)
    gc.collect()
    runner.mark_warm()


Load = Callable[[Runner], None]


def list_cpu_loads(ready: Ready) -> list[Load]:
    """Lists steps of a prompt and of some tokens after it."""
    length = max(1, min(_PROMPT_TOKENS, SyntheticRows(ready).count_room(_DECODE_STEPS), ready.max_tokens))
    return [make_rows_load([length], (TokenSampling(top_p=0.9),))]


def list_gpu_loads(ready: Ready, num_parts: int = 1) -> list[Load]:
    """Lists all steps that a GPU computes first."""
    return list_row_loads(ready, num_parts) + list_prompt_loads(ready, num_parts)


def list_prompt_loads(ready: Ready, num_parts: int) -> list[Load]:
    """Lists steps of one prompt, as long as may be and shorter, in whole and in parts."""
    room = _count_room(ready)
    lengths = [room // part for part in (1, 2, 16)] + [LEAST_TOKENS * num_parts] * (num_parts > 1)
    return [make_rows_load([length], (GREEDY,)) for length in lengths if 0 < length <= room]


def _count_room(ready: Ready) -> int:
    """Counts the tokens of the longest prompt that a step can have and that some more tokens can follow."""
    return max(1, min(SyntheticRows(ready).count_room(_DECODE_STEPS + 2), ready.max_tokens))


def list_row_loads(ready: Ready, num_parts: int, num_decode: int = _DECODE_STEPS) -> list[Load]:
    """Lists steps of few rows and of many, short, alone and grouped; in whole and in parts.

    num_decode: steps after a prompt's.
    """
    make = partial(make_rows_load, num_decode=num_decode)
    size = ready.page_size
    length = min(_PROMPT_TOKENS, _count_room(ready))
    pages = -(-(length + _DECODE_STEPS + 2) // size)
    most = min(ready.max_seqs, max(1, ready.num_pages // pages - 1), ready.max_tokens // length)
    loads: list[Load] = []
    for count in dict.fromkeys((*add_part_counts((1, 2, 3, 17, 64, 300, 1100), num_parts), most)):
        if 0 < count <= most:
            loads.append(make([length] * count, PLAIN))
            if count in (1, 17, most):
                loads += [make([length] * min(count, 300), (*kinds, GREEDY)) for kinds in (FULL, TORCH)]
    loads.append(make([1], (GREEDY,)))
    grouped = [(count, 4, count) for count in add_part_counts((64,), num_parts)] + [(2, 1, 2), (most, 32, most)]
    # More rows than start early (`kernels.launches.pdl`), with so many keys each that several programs read them.
    for count, shared, num_grouped in (*grouped, (17, 32, 0)):
        fits = shared + count * pages <= ready.num_pages and 1 < count <= ready.max_seqs
        if fits and (shared + pages) * size <= ready.max_context and count * 2 <= ready.max_tokens:
            loads.append(make([shared * size + 2] * count, PLAIN, shared, num_grouped))
    return loads


def add_part_counts(counts: Sequence[int], num_parts: int) -> list[int]:
    """Returns the counts, and for a step in parts also those that give each part so many rows."""
    return [*counts, *(count * num_parts for count in counts)] if num_parts > 1 else [*counts]


def make_largest_load(ready: Ready) -> Load:
    """Makes a step of the most tokens, of the most rows, that sample in every way."""
    each = max(1, min(ready.max_tokens // ready.max_seqs, ready.max_context - 2))
    lengths = np.full(ready.max_seqs, each)
    more = np.full(ready.max_seqs, max(0, ready.max_context - 2 - each)).cumsum()
    spare = ready.max_tokens - int(lengths.sum())
    lengths += np.diff(np.minimum(more, spare), prepend=0)
    return make_rows_load(lengths.tolist(), (*PLAIN, FULL[0], TORCH[1]), num_decode=1, reuse=True)


def make_rows_load(
    lengths: Sequence[int],
    sampling: Sequence[TokenSampling],
    num_shared: int = 0,
    num_grouped: int = 0,
    num_decode: int = _DECODE_STEPS,
    reuse: bool = False,
) -> Load:
    """Makes prompts, tokens after them, and one more prompt beside them, as far as they fit or `reuse` pages."""

    def load(runner: Runner) -> None:
        rows = SyntheticRows(runner.ready, num_shared, reuse)
        runner.run(rows.make_step(lengths, sampling))
        for _ in range(num_decode):
            if rows.has_room(0):
                runner.run(rows.make_step(num_grouped=num_grouped))
        if len(lengths) < runner.ready.max_seqs and len(lengths) + lengths[0] <= runner.ready.max_tokens:
            another = min(lengths[0], num_shared * runner.ready.page_size + 3)
            if rows.has_room(another):
                runner.run(rows.make_step([another], (GREEDY,), num_grouped))
        runner.run(rows.end())

    return load
