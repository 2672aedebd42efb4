"""One rank's forward passes: takes steps in order, launches them ahead of the device, answers what each sampled.

Knows no requests, no text and no sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from toka_async.arrays import Int32, as_i32
from toka_async.attention.base import AttentionBackend, GraphAttention, PrefixGroup
from toka_async.messages import Ready, Step, StepDone
from toka_async.runner.clock import StepClock
from toka_async.runner.copies import upload
from toka_async.runner.history import History
from toka_async.runner.inputs import StepInputs, StepRows, build_inputs, groups_of, rows_of
from toka_async.runner.prompt_logprobs import asked_chunks, prompt_logprobs
from toka_async.runner.results import Launched
from toka_async.runner.rows import Rows
from toka_async.runner.samples import Samples
from toka_async.runner.slab_sampler import SlabSampler

if TYPE_CHECKING:  # needs Triton, which is not everywhere
    from toka_async.runner.decode import DecodePass
    from toka_async.runner.row_shares import RowShares


class Model(Protocol):
    """What the runner calls of a decoder; `model.decoder` is one."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend, wanted: Tensor | None = None
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Cache(Protocol):
    """What the runner calls of the KV cache; `attention.kv_cache` is one."""

    def copy_pages(self, src: Tensor, dst: Tensor) -> None: ...


def no_compiles() -> int:
    return 0


def every_group_pays(num_rows: int, num_tokens: int) -> bool:  # noqa: ARG001
    return True


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
        agree: makes of what one rank measured what all ranks go by.
        shares: how tensor ranks divide the rows that kernels sample; None: one rank alone.
    """

    def __init__(
        self,
        model: Model,
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
        self._rows = Rows(ready, device)
        self._history = History(ready.num_pages + 1, ready.page_size, device)
        self._clock = StepClock(device)
        self.decode: DecodePass | None = None
        if use_kernels:
            from toka_async.runner.decode import DecodePass

            every = forward or (lambda token_ids, positions: model.forward(token_ids, positions, attention))
            self.decode = DecodePass(every, model.logits, graphs, self._rows, self._history, agree, shares)
        self._sampler = self.decode.sampler if self.decode else SlabSampler(model.logits, self._rows, self._history)

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

    def launch(self, step: Step) -> Launched:
        """Tell the device to compute a step of one pass. A GPU does so later; what it samples stays there, too."""
        with torch.inference_mode():
            return self._launch(step)

    def _launch(self, step: Step) -> Launched:
        span = self._clock.begin()
        rows = self._rows
        self._apply(step)
        step_rows, groups = rows_of(rows, step), self._groups(step)
        asked = asked_chunks(rows, step_rows)
        samples, of_chunks = None, None
        if not step_rows.slots.size:
            pass
        elif self.decode is not None and self.decode.can_replay(step_rows, bool(groups)):
            samples = self.decode.replay(step_rows, groups)
        else:
            samples, hidden = self._compute(build_inputs(rows, step_rows, groups), step_rows, bool(asked))
            if asked:
                of_chunks = prompt_logprobs(hidden, asked, self._model.logits, rows.vocab_size)
        rows.advance(step_rows.slots, step_rows.lengths)
        num_compiles = self._num_compiles() - self._compiles_before
        return Launched(step.step_id, samples, asked, of_chunks, self._clock, span, num_compiles)

    def _apply(self, step: Step) -> None:
        """The step's events, on the host's tables and the device's."""
        rows, before = self._rows, self._rows.order
        admitted = rows.apply(step)
        if self.decode is not None and admitted.size:
            self.decode.sampler.admit(admitted)
        if rows.order is not before:
            self._set_order(rows.order)
        if step.copy_sources:
            sources, targets = upload((as_i32(step.copy_sources), as_i32(step.copy_targets)), rows.device)
            self._cache.copy_pages(sources, targets)
            self._history.copy_pages(sources, targets)

    def _groups(self, step: Step) -> tuple[PrefixGroup, ...]:
        """Those of the step's groups that pay here."""
        size = self.ready.page_size
        return tuple(group for group in groups_of(step) if self._pays(group.num_rows, group.num_pages * size))

    def _set_order(self, order: Int32) -> None:
        padded = self.decode.padded(order) if self.decode is not None else order.size
        self._rows.on_device.set_order(order, padded)

    def _compute(self, inputs: StepInputs, step_rows: StepRows, every_token: bool) -> tuple[Samples | None, Tensor]:
        """The rows' next tokens, and hidden states: of every token, or of those that are sampled.

        Afterwards the cache holds the step's tokens.
        """
        rows, batch = self._rows.on_device, inputs.attention
        self._history.write(batch.write_indices, inputs.token_ids)
        self._attention.plan(batch)
        hidden = self._hidden(inputs, None if every_token else inputs.sampled)
        rows.advance(batch.slots, batch.contexts)
        slots, contexts = step_rows.sampled()
        if not slots.size:
            return None, hidden
        last = hidden.index_select(0, inputs.sampled) if every_token and inputs.sampled is not None else hidden
        samples = self._sampler.sample(last, slots, contexts, inputs.sample_slots, inputs.sample_contexts)
        rows.sampled(inputs.sample_slots, samples.token_ids)
        return samples, hidden

    def _hidden(self, inputs: StepInputs, wanted: Tensor | None) -> Tensor:
        if self._forward is None:
            return self._model.forward(inputs.token_ids, inputs.positions, self._attention, wanted)
        hidden = self._forward(inputs.token_ids, inputs.positions)
        return hidden if wanted is None else hidden.index_select(0, wanted)
