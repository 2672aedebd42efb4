"""One rank's forward passes: takes steps in order, answers each with what it sampled.

Knows no requests, no text and no sockets.
"""

from __future__ import annotations

import time
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from toka_async.arrays import as_i32
from toka_async.attention.base import AttentionBackend
from toka_async.messages import Ready, Step, StepDone
from toka_async.runner.copies import upload
from toka_async.runner.history import History
from toka_async.runner.inputs import StepInputs, StepRows, build_inputs, rows_of
from toka_async.runner.prompt_logprobs import asked_chunks, prompt_logprobs
from toka_async.runner.results import step_done
from toka_async.runner.rows import Rows
from toka_async.runner.sampler import Sampler, Samples


class Model(Protocol):
    """What the runner calls of a decoder; `model.decoder` is one."""

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Cache(Protocol):
    """What the runner calls of the KV cache; `attention.kv_cache` is one."""

    def copy_pages(self, src: Tensor, dst: Tensor) -> None: ...


class Runner:
    """Runs steps on one device.

    ready: what fits, for the scheduler.
    """

    def __init__(
        self, model: Model, cache: Cache, attention: AttentionBackend, ready: Ready, device: torch.device
    ) -> None:
        self.ready = ready
        self._model = model
        self._cache = cache
        self._attention = attention
        self._rows = Rows(ready.max_seqs, ready.page_size, ready.vocab_size, device)
        self._history = History(ready.num_pages, ready.page_size, device)
        self._sampler = Sampler(model.logits, self._rows, self._history)

    def run(self, step: Step) -> StepDone:
        """One forward pass; a step of events alone computes nothing and samples nothing."""
        started = time.perf_counter()
        with torch.inference_mode():
            done = self._run(step)
        return msgspec.structs.replace(done, seconds=time.perf_counter() - started)

    def _run(self, step: Step) -> StepDone:
        rows = self._rows
        rows.apply(step)
        self._copy_pages(step)
        step_rows = rows_of(rows, step)
        if not step_rows.slots.size:
            return step_done(step.step_id, None, (), None)
        inputs = build_inputs(rows, step, step_rows)
        hidden = self._forward(inputs)
        rows.advance(step_rows.slots, step_rows.lengths)
        samples = self._sample(hidden, inputs, step_rows)
        asked = asked_chunks(rows, step_rows)
        of_chunks = prompt_logprobs(hidden, asked, self._model.logits, rows.vocab_size) if asked else None
        return step_done(step.step_id, samples, asked, of_chunks)

    def _copy_pages(self, step: Step) -> None:
        if not step.copy_sources:
            return
        sources, targets = upload((as_i32(step.copy_sources), as_i32(step.copy_targets)), self._rows.device)
        self._cache.copy_pages(sources, targets)
        self._history.copy_pages(sources, targets)

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [t, hidden]; afterwards the cache holds the step's tokens."""
        self._history.write(inputs.attention.write_indices, inputs.token_ids)
        self._attention.plan(inputs.attention)
        return self._model.forward(inputs.token_ids, inputs.positions, self._attention)

    def _sample(self, hidden: Tensor, inputs: StepInputs, step_rows: StepRows) -> Samples | None:
        """The rows' new tokens, which become their last ones; None when no row samples."""
        samples = step_rows.samples
        if not inputs.sample_slots.numel():
            return None
        if inputs.sampled is not None:
            hidden = hidden.index_select(0, inputs.sampled)
        drawn = self._sampler.sample(hidden, step_rows.slots[samples], step_rows.contexts[samples])
        self._rows.last_tokens.index_copy_(0, inputs.sample_slots, drawn.token_ids)
        return drawn
