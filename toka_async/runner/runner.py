"""Runs one rank's forward passes: takes steps in order, launches them ahead of the device, answers what each sampled.

A stage of a pipeline computes a step in parts, and samples only if it is the last. Knows no requests and no text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32, as_i32
from toka_async.attention.base import PrefixGroup
from toka_async.attention.build import BuiltAttention
from toka_async.attention.states.cache import StateCache
from toka_async.grammars.matchers import RowMatchers
from toka_async.messages import Ready, Step, StepDone
from toka_async.model.compiles import CompileCounter
from toka_async.model.load_counter import LoadCounter
from toka_async.model.sampling import sample
from toka_async.runner.clock import StepClock, StepSpan
from toka_async.runner.copies import upload
from toka_async.runner.inputs import (
    SampledTokens,
    StepInputs,
    StepModel,
    StepRows,
    build_inputs,
    make_step_rows,
    read_groups,
)
from toka_async.runner.masks import GrammarMasks
from toka_async.runner.micro_batches import Cutter, MicroBatch
from toka_async.runner.pipeline import Pipeline, StageSetup
from toka_async.runner.prompt_logprobs import compute_prompt_logprobs, find_asked_chunks
from toka_async.runner.results import LaunchedLoads, LaunchedStep, PartResults
from toka_async.runner.rows import RowTables
from toka_async.runner.samples import Draws, Sampler
from toka_async.runner.slab_sampler import SlabDraw, SlabSampler
from toka_async.runner.token_history import TokenHistory

if TYPE_CHECKING:  # needs Triton, which is not everywhere
    from toka_async.runner.decode import DecodePass
    from toka_async.runner.mixed import MixedPass
    from toka_async.runner.samples import RowShares


class Cache(Protocol):
    """The part of the KV cache that the runner calls; `attention.kv_cache` implements it."""

    def copy_pages(self, src: Tensor, dst: Tensor, windows: tuple[Tensor, Tensor] | None = None) -> None: ...


@dataclass(slots=True, frozen=True)
class SamplingSetup:
    """How next tokens are drawn. kernels: with kernels, on a GPU. shares: how tensor ranks divide rows, if they do.

    draw: samples rows in plain torch. matchers: of rows with a grammar; None: no row may have one.
    """

    kernels: bool = False
    shares: RowShares | None = None
    draw: SlabDraw = sample
    matchers: RowMatchers | None = None


class Runner:
    """Runs steps on one device.

    ready: what fits, for the scheduler. decode: passes of decoding rows alone; None if no kernels sample. mixed: other
    steps in graphs; None if attention cannot be captured.
    """

    def __init__(
        self,
        ready: Ready,
        device: torch.device,
        model: StepModel,
        cache: Cache,
        attention: BuiltAttention,
        sampling: SamplingSetup | None = None,
        stage: StageSetup | None = None,
        compiles: CompileCounter | None = None,
        loads: LoadCounter | None = None,
        states: StateCache | None = None,
    ) -> None:
        """stage: the pipeline stage whose model and cache these are; None without a pipeline. loads: of its experts.

        states: of its recurrent layers; None: it has none.
        """
        sampling = sampling or SamplingSetup()
        self.ready = ready
        self.device = device
        self.model = model
        self.cache = cache
        self.states = states
        self._attention = attention
        self._compiles = compiles or CompileCounter()
        self._loads = loads
        self._rows = RowTables(ready, device)
        self._pipeline = Pipeline(stage, self._rows.on_device) if stage is not None else None
        self._cutter = self._pipeline.cutter if self._pipeline is not None else Cutter()
        self._history: TokenHistory | None = None  # only sampling needs it
        if stage is None or stage.is_last:
            self._history = TokenHistory(ready.num_pages + 1, ready.page_size, device)
        self._clock = StepClock(device)
        self._masks: GrammarMasks | None = None
        if self._history is not None and sampling.matchers is not None:
            self._masks = GrammarMasks(sampling.matchers, self._rows)
        self.decode: DecodePass | None = None
        self.mixed: MixedPass | None = None
        residuals = stage.make_residuals if stage is not None and not stage.is_first else None
        if attention.mixed is not None:
            from toka_async.runner.mixed import MixedPass

            self.mixed = MixedPass(model, attention.mixed, self._rows, self._history, residuals)
        if sampling.kernels:
            from toka_async.runner.decode import DecodePass

            self.decode = DecodePass(
                model, attention.graphs, self._rows, self._history, sampling.shares, residuals, sampling.draw
            )
        self._sampler = self._make_sampler(sampling.draw)
        self._admitted: Int32 = np.empty(0, dtype=np.int32)  # whose sampling parameters are not on the device yet

    def _make_sampler(self, draw: SlabDraw) -> Sampler | None:
        if self._history is None:
            return None
        if self.decode is not None:
            return self.decode.sampler
        return SlabSampler(self.model.logits, self._rows, self._history, draw)

    def launch_graphs(self) -> None:
        """Launches all graphs once, for padding. No row may run."""
        with torch.inference_mode():
            for part in (self.decode, self.mixed):
                if part is not None and part.graphs is not None:
                    part.graphs.launch()

    def mark_warm(self) -> None:
        """Counts compilations and the experts' tokens from now on."""
        self._compiles.reset()
        if self._loads is not None:
            self._loads.reset()

    def enter_thread(self) -> None:
        """Makes the rank's GPU that of the calling thread, which would otherwise take memory on the first GPU."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def run(self, step: Step) -> StepDone:
        """Computes one step. A step of events alone computes nothing and samples nothing."""
        return self.launch(step).collect()

    def launch(self, step: Step) -> LaunchedStep:
        """Tells the device to compute a step of one pass. A GPU does so later, and keeps what it samples."""
        with torch.inference_mode():
            return self._launch(step)

    @property
    def counts_loads(self) -> bool:
        """Tells whether the stage has experts."""
        return self._loads is not None

    def launch_loads(self) -> LaunchedLoads:
        """Tells the device to copy what was counted of experts since the last time."""
        assert self._loads is not None
        with torch.inference_mode():
            return LaunchedLoads(self._loads.take())

    def _launch(self, step: Step) -> LaunchedStep:
        span = self._clock.begin()
        rows = self._rows
        self._apply(step)
        step_rows = make_step_rows(rows, step)
        parts = [self._launch_part(part, span) for part in self._cutter.cut(step_rows, read_groups(step))]
        rows.advance(step_rows.slots, step_rows.lengths)
        self._admit_sampling()
        loads = None if self._loads is None else self._loads.take_due()
        return LaunchedStep(step.step_id, parts, self._clock, span, self._compiles.count(), loads)

    def _launch_part(self, part: MicroBatch, span: StepSpan) -> PartResults:
        rows, step_rows, pipeline, residuals = self._rows, part.rows, self._pipeline, None
        if self._loads is not None:
            self._loads.begin(step_rows.num_tokens)
        groups = self._select_paying(part.groups)
        if pipeline is not None:
            num_decode = step_rows.num_decode
            padded = self._count_padded(step_rows.slots) if num_decode == step_rows.slots.size else num_decode
            rows.on_device.take_order(part.first_row, num_decode, padded)
            with self._clock.stall(span):
                residuals = pipeline.receive(step_rows)
        asked = find_asked_chunks(rows, step_rows) if self._sampler is not None else []
        masked = None if self._masks is None else self._masks.select(step_rows.slots[step_rows.samples])
        before_draw = None if self._masks is None or masked is None else partial(self._masks.fill, masked)
        of_chunks = None
        if step_rows.num_decode == step_rows.slots.size:
            self._admit_sampling()
        if self.decode is not None and self.decode.can_replay(step_rows, bool(groups)):
            samples, hidden = self.decode.replay(step_rows, groups, residuals, before_draw)
        else:
            samples, hidden = self._compute(step_rows, groups, bool(asked), residuals, before_draw)
            if asked:
                of_chunks = compute_prompt_logprobs(hidden, asked, self.model.logits, rows.vocab_size)
        if pipeline is not None:
            pipeline.pass_on(step_rows, hidden, None if samples is None else samples.token_ids)
        results = PartResults(samples, asked, of_chunks, part.places, masked)
        if self._masks is not None and masked is not None and samples is not None:
            self._masks.follow(masked, results.download)
        return results

    def _apply(self, step: Step) -> None:
        rows, before = self._rows, self._rows.order
        copied = window_sources = None
        if step.copy_sources:
            copied = upload((as_i32(step.copy_sources), as_i32(step.copy_targets)), rows.device)
            window_sources = rows.on_device.find_windows(copied[0])  # before the step gives them to other pages
        admitted = rows.apply(step)
        if self.decode is not None and self.decode.sampler is not None:
            self._admitted = admitted
        if self._masks is not None and (admitted.size or step.freed):
            self._masks.apply(as_i32(step.freed), admitted)
        if admitted.size and self._pipeline is not None:
            self._pipeline.admit(admitted)
        if rows.order is not before:
            self._set_order(rows.order)
        if copied is not None and window_sources is not None:
            sources, targets = copied
            self.cache.copy_pages(sources, targets, (window_sources, rows.on_device.find_windows(targets)))
            if self._history is not None:
                self._history.copy_pages(sources, targets)
        if admitted.size and self.states is not None:
            self.states.begin(admitted, as_i32(step.admit_snapshots))

    def _admit_sampling(self) -> None:
        """Copies the sampling parameters of rows that the step admitted, unless they are there."""
        if self._admitted.size:
            assert self.decode is not None
            assert self.decode.sampler is not None
            self.decode.sampler.admit(self._admitted)
            self._admitted = self._admitted[:0]

    def _select_paying(self, groups: tuple[PrefixGroup, ...]) -> tuple[PrefixGroup, ...]:
        """Selects the groups whose prefix is worth reading once."""
        size = self.ready.page_size
        return tuple(group for group in groups if self._attention.pays(group.num_rows, group.num_pages * size))

    def _set_order(self, order: Int32) -> None:
        if self._pipeline is not None:
            self._rows.on_device.keep_order(order)
        else:
            self._rows.on_device.set_order(order, self._count_padded(order))

    def _count_padded(self, order: Int32) -> int:
        return self.decode.count_padded(order) if self.decode is not None else order.size

    def _compute(
        self,
        step_rows: StepRows,
        groups: tuple[PrefixGroup, ...],
        every_token: bool,
        residuals: Tensor | None,
        before_draw: Callable[[], None] | None,
    ) -> tuple[Draws | None, Tensor]:
        """Computes the rows' next tokens, and hidden states of every token or of those that are sampled.

        A stage that does not sample returns every token's residuals. Afterwards the cache holds the step's tokens.
        """
        if self.mixed is not None and self.mixed.can_replay(step_rows):
            attended, residual, sampled = self.mixed.replay(step_rows, groups, residuals)
        else:
            attended, residual, sampled = self._begin(build_inputs(self._rows, step_rows, groups), residuals)
        every_token = every_token or self._sampler is None
        hidden = self.model.finish(attended, residual, None if every_token else sampled.tokens)
        del attended, residual  # logits need the memory
        slots, contexts = step_rows.list_sampling()
        if not slots.size or self._sampler is None:
            return None, hidden
        self._admit_sampling()  # not before: the device computes meanwhile, and a prompt's first token comes sooner
        last = hidden.index_select(0, sampled.tokens) if every_token and sampled.tokens is not None else hidden
        samples = self._sampler.sample(last, slots, contexts, sampled.slots, sampled.contexts, before_draw)
        self._rows.on_device.set_sampled(sampled.slots, samples.token_ids)
        return samples, hidden

    def _begin(self, inputs: StepInputs, residuals: Tensor | None) -> tuple[Tensor, Tensor, SampledTokens]:
        """Computes a step up to the last layer's attention, as `StepModel.begin` does."""
        batch = inputs.attention
        if self._history is not None:
            self._history.write(batch.write_indices, inputs.token_ids)
        self._attention.backend.plan(batch)
        first = inputs.token_ids if residuals is None else residuals
        attended, residual = self.model.begin(first, inputs.positions, self._attention.backend)
        self._rows.on_device.advance(batch.slots, batch.contexts)
        return attended, residual, inputs.sampled
