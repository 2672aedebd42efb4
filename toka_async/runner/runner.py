"""One rank's forward passes: takes steps in order, launches them ahead of the device, answers what each sampled.

A stage of a pipeline computes a step in parts, and samples only if it is the last. Knows no requests, no text and no
sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from toka_async.arrays import Int32, as_i32
from toka_async.attention.base import AttentionBackend, GraphAttention, PrefixGroup
from toka_async.attention.choice import every_group_pays
from toka_async.messages import Ready, Step, StepDone
from toka_async.runner.clock import StepClock, StepSpan
from toka_async.runner.copies import upload
from toka_async.runner.inputs import StepInputs, StepRows, build_inputs, groups_of, rows_of
from toka_async.runner.micro_batches import Cutter, MicroBatch
from toka_async.runner.pipeline import Pipeline, StageSetup
from toka_async.runner.prompt_logprobs import asked_chunks, prompt_logprobs
from toka_async.runner.results import LaunchedStep, PartResults
from toka_async.runner.rows import RowTables
from toka_async.runner.samples import Draws, Sampler
from toka_async.runner.slab_sampler import SlabSampler
from toka_async.runner.token_history import TokenHistory

if TYPE_CHECKING:  # needs Triton, which is not everywhere
    from toka_async.runner.decode import DecodePass
    from toka_async.runner.row_shares import RowShares


class StepModel(Protocol):
    """What the runner calls of a decoder; `model.decoder` is one."""

    def forward(
        self, inputs: Tensor, positions: Tensor, attention: AttentionBackend, wanted: Tensor | None = None
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Cache(Protocol):
    """What the runner calls of the KV cache; `attention.kv_cache` is one."""

    def copy_pages(self, src: Tensor, dst: Tensor) -> None: ...


def no_compiles() -> int:
    return 0


class Runner:
    """Runs steps on one device.

    ready: what fits, for the scheduler. decode: passes of decoding rows alone, on a GPU with `use_kernels`.

    Args:
        forward: the model's forward pass, if it is not to be called itself (compiled).
        num_compiles: how often something was compiled up to now.
        freeze: called when the runner is warm.
        use_kernels: sample with kernels; a GPU's.
        graphs: the attention, if its decoding can be captured.
        pays: whether a group of so many rows should read a prefix of so many tokens once.
        agree: makes of what one rank measured what all ranks of the stage go by.
        shares: how tensor ranks divide the rows that kernels sample; None: one rank alone.
        setup: of a stage of a pipeline; its model is that stage's.
    """

    def __init__(
        self,
        model: StepModel,
        cache: Cache,
        attention: AttentionBackend,
        ready: Ready,
        device: torch.device,
        forward: Callable[[Tensor, Tensor], Tensor] | None = None,
        num_compiles: Callable[[], int] | None = None,
        freeze: Callable[[], None] | None = None,
        use_kernels: bool = False,
        graphs: GraphAttention | None = None,
        pays: Callable[[int, int], bool] | None = None,
        agree: Callable[[bytes], bytes] = bytes,
        shares: RowShares | None = None,
        setup: StageSetup | None = None,
    ) -> None:
        self.ready = ready
        self.device = device
        self._model = model
        self._cache = cache
        self._attention = attention
        self._forward = forward
        self._num_compiles = num_compiles or no_compiles
        self._compiles_before = 0
        self._freeze = freeze
        self._pays = pays or every_group_pays
        self._rows = RowTables(ready, device)
        self._pipeline = Pipeline(setup, self._rows.on_device) if setup is not None else None
        self._cutter = self._pipeline.cutter if self._pipeline is not None else Cutter()
        self._history: TokenHistory | None = None  # where nothing is sampled, none is needed
        if setup is None or setup.is_last:
            self._history = TokenHistory(ready.num_pages + 1, ready.page_size, device)
        self._clock = StepClock(device)
        self.decode: DecodePass | None = None
        if use_kernels:
            from toka_async.runner.decode import DecodePass

            every = forward or (lambda inputs, positions: model.forward(inputs, positions, attention))
            head = model.logits if self._history is not None else None
            residuals = setup.residuals if setup is not None and not setup.is_first else None
            self.decode = DecodePass(every, head, graphs, self._rows, self._history, agree, shares, residuals)
        self._sampler = self._make_sampler()

    def _make_sampler(self) -> Sampler | None:
        if self._history is None:
            return None
        if self.decode is not None:
            return self.decode.sampler
        return SlabSampler(self._model.logits, self._rows, self._history)

    def warmed(self) -> None:
        """From now on, a compilation counts."""
        self._compiles_before = self._num_compiles()
        if self._freeze is not None:
            self._freeze()

    def enter_thread(self) -> None:
        """To be called in a thread that waits for steps: it would begin with the first GPU, and take memory there."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def run(self, step: Step) -> StepDone:
        """One forward pass; a step of events alone computes nothing and samples nothing."""
        return self.launch(step).collect()

    def launch(self, step: Step) -> LaunchedStep:
        """Tell the device to compute a step of one pass. A GPU does so later; what it samples stays there, too."""
        with torch.inference_mode():
            return self._launch(step)

    def _launch(self, step: Step) -> LaunchedStep:
        span = self._clock.begin()
        rows = self._rows
        self._apply(step)
        step_rows = rows_of(rows, step)
        parts = [self._launch_part(part, span) for part in self._cutter.cut(step_rows, groups_of(step))]
        rows.advance(step_rows.slots, step_rows.lengths)
        return LaunchedStep(step.step_id, parts, self._clock, span, self._num_compiles() - self._compiles_before)

    def _launch_part(self, part: MicroBatch, span: StepSpan) -> PartResults:
        rows, step_rows, pipeline, residuals = self._rows, part.rows, self._pipeline, None
        groups = self._paying(part.groups)
        if pipeline is not None:
            num_decode = step_rows.num_decode
            padded = self._padded(step_rows.slots) if num_decode == step_rows.slots.size else num_decode
            rows.on_device.take_order(part.first_row, num_decode, padded)
            with self._clock.stalled(span):
                residuals = pipeline.receive(step_rows)
        asked = asked_chunks(rows, step_rows) if self._sampler is not None else []
        of_chunks = None
        if self.decode is not None and self.decode.can_replay(step_rows, bool(groups)):
            samples, hidden = self.decode.replay(step_rows, groups, residuals)
        else:
            samples, hidden = self._compute(build_inputs(rows, step_rows, groups), step_rows, bool(asked), residuals)
            if asked:
                of_chunks = prompt_logprobs(hidden, asked, self._model.logits, rows.vocab_size)
        if pipeline is not None:
            pipeline.pass_on(step_rows, hidden, None if samples is None else samples.token_ids)
        return PartResults(samples, asked, of_chunks, part.places, self._clock.copies)

    def _apply(self, step: Step) -> None:
        """The step's events, on the host's tables and the device's."""
        rows, before = self._rows, self._rows.order
        admitted = rows.apply(step)
        if admitted.size and self.decode is not None and self.decode.sampler is not None:
            self.decode.sampler.admit(admitted)
        if admitted.size and self._pipeline is not None:
            self._pipeline.admitted(admitted)
        if rows.order is not before:
            self._set_order(rows.order)
        if step.copy_sources:
            sources, targets = upload((as_i32(step.copy_sources), as_i32(step.copy_targets)), rows.device)
            self._cache.copy_pages(sources, targets)
            if self._history is not None:
                self._history.copy_pages(sources, targets)

    def _paying(self, groups: tuple[PrefixGroup, ...]) -> tuple[PrefixGroup, ...]:
        """Those of the groups that pay here."""
        size = self.ready.page_size
        return tuple(group for group in groups if self._pays(group.num_rows, group.num_pages * size))

    def _set_order(self, order: Int32) -> None:
        if self._pipeline is not None:
            self._rows.on_device.keep_order(order)
        else:
            self._rows.on_device.set_order(order, self._padded(order))

    def _padded(self, order: Int32) -> int:
        """Rows that a pass of these takes."""
        return self.decode.padded(order) if self.decode is not None else order.size

    def _compute(
        self, inputs: StepInputs, step_rows: StepRows, every_token: bool, residuals: Tensor | None
    ) -> tuple[Draws | None, Tensor]:
        """The rows' next tokens, and hidden states: of every token, or of those that are sampled.

        A stage that does not sample gives every token's residuals. Afterwards the cache holds the step's tokens.
        """
        rows, batch = self._rows.on_device, inputs.attention
        if self._history is not None:
            self._history.write(batch.write_indices, inputs.token_ids)
        self._attention.plan(batch)
        every_token = every_token or self._sampler is None
        hidden = self._hidden(inputs, None if every_token else inputs.sampled, residuals)
        rows.advance(batch.slots, batch.contexts)
        slots, contexts = step_rows.sampled()
        if not slots.size or self._sampler is None:
            return None, hidden
        last = hidden.index_select(0, inputs.sampled) if every_token and inputs.sampled is not None else hidden
        samples = self._sampler.sample(last, slots, contexts, inputs.sample_slots, inputs.sample_contexts)
        rows.sampled(inputs.sample_slots, samples.token_ids)
        return samples, hidden

    def _hidden(self, inputs: StepInputs, wanted: Tensor | None, residuals: Tensor | None) -> Tensor:
        first = inputs.token_ids if residuals is None else residuals
        if self._forward is None:
            return self._model.forward(first, inputs.positions, self._attention, wanted)
        hidden = self._forward(first, inputs.positions)
        return hidden if wanted is None else hidden.index_select(0, wanted)
