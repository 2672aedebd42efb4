"""A rank's part in a pipeline: what it waits for before a micro-batch, and what it passes on after it.

Residuals go from stage to stage. The last stage sends what it samples to the first, which embeds it. The first stage
waits only for the tokens that a micro-batch's rows continue from, so the next step's first micro-batches can follow
while this step's last ones are under way. The host waits only on a CPU. Knows slots; knows no model.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32, Int64
from toka_async.runner.copies import upload
from toka_async.runner.device_rows import DeviceRows
from toka_async.runner.inputs import StepRows
from toka_async.runner.links import StageLinks
from toka_async.runner.micro_batches import LEAST_TOKENS, Cutter


@dataclass(slots=True, frozen=True)
class StageSetup:
    """The parts of a stage. num_parts: micro-batches of a step, at most. size, dtype: of what a token passes on."""

    links: StageLinks
    num_parts: int
    size: int
    dtype: torch.dtype
    device: torch.device
    least_tokens: int = LEAST_TOKENS

    @property
    def is_first(self) -> bool:
        return self.links.before is None

    @property
    def is_last(self) -> bool:
        return self.links.after is None

    def make_residuals(self, num_rows: int) -> Tensor:
        return torch.zeros(num_rows, self.size, dtype=self.dtype, device=self.device)


class Pipeline:
    """One rank's end of the links, over its `rows`. Drops what an earlier user of the links left in them."""

    def __init__(self, setup: StageSetup, rows: DeviceRows) -> None:
        self.cutter = Cutter(setup.num_parts, setup.least_tokens)
        self._links = setup.links
        self._rows = rows
        # The first stage counts the micro-batches that sampled, and keeps which one a slot's newest token comes from
        # (-1: the host knew it) and whose tokens are under way.
        self._num_sampled = 0
        self._sampled_by: Int64 = np.full(rows.padding + 1, -1, dtype=np.int64)
        self._under_way: deque[tuple[int, Int32]] = deque()
        if setup.links.tokens_from_last is not None:
            setup.links.tokens_from_last.discard()

    def admit(self, slots: Int32) -> None:
        """Forgets the slots' tokens under way: they belong to earlier rows, and the host knows the new rows' ones."""
        self._sampled_by[slots] = -1

    def receive(self, rows: StepRows) -> Tensor | None:
        """Returns the micro-batch's residuals [t, hidden]; the first stage waits for its rows' tokens instead.

        Must be called when everything before the micro-batch is launched.
        """
        before = self._links.before
        if before is None:
            needed = self._sampled_by[rows.slots[: rows.num_decode]].max(initial=-1)
            while self._under_way and self._under_way[0][0] <= needed:
                self._take_tokens()
            return None
        before.post(rows.num_tokens)
        return before.take()

    def pass_on(self, rows: StepRows, hidden: Tensor | None, token_ids: Tensor | None) -> None:
        """Sends the residuals or the sampled tokens of a micro-batch that is launched to the stages that need them."""
        links = self._links
        if links.after is not None:
            assert hidden is not None
            links.after.send(hidden)
        if links.before is not None:
            links.before.release()  # after the send: the stage may have added to what it received in place
        if links.tokens_to_first is not None and token_ids is not None:
            links.tokens_to_first.send(token_ids.long())
        if links.tokens_from_last is not None and rows.samples.any():
            self._expect_tokens(rows.slots[rows.samples])

    def _expect_tokens(self, slots: Int32) -> None:
        """Posts the receive at once, since the last stage sends whether or not another step follows."""
        receiver = self._links.tokens_from_last
        assert receiver is not None
        while receiver.is_full:
            self._take_tokens()
        receiver.post(slots.size)
        self._under_way.append((self._num_sampled, slots))
        self._sampled_by[slots] = self._num_sampled
        self._num_sampled += 1

    def _take_tokens(self) -> None:
        """Makes the oldest tokens under way their slots' next ones, except for slots that have new rows."""
        receiver = self._links.tokens_from_last
        assert receiver is not None
        number, slots = self._under_way.popleft()
        (slots_at,) = upload(
            (np.where(self._sampled_by[slots] == number, slots, self._rows.padding),), self._rows.device
        )
        self._rows.set_sampled(slots_at, receiver.take())
        receiver.release()
