"""A rank's part in a pipeline: what it waits for before a micro-batch, and what it passes on after it.

Residuals go from stage to stage; what the last one samples goes back to the first, which embeds it. The first stage
waits only for the tokens that a micro-batch's rows go on from, so that the micro-batches of the next step follow while
the last ones of this step are under way. Nothing here waits on the host, but on a CPU. Knows slots; knows no model.
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
    """What a stage is made of.

    num_parts: micro-batches of a step, at most. hidden_size, dtype: of residuals. least_tokens: see `Cutter`.
    """

    links: StageLinks
    num_parts: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    least_tokens: int = LEAST_TOKENS

    @property
    def is_first(self) -> bool:
        return self.links.before is None

    @property
    def is_last(self) -> bool:
        return self.links.after is None

    def residuals(self, num_rows: int) -> Tensor:
        """Memory for those of so many rows."""
        return torch.zeros(num_rows, self.hidden_size, dtype=self.dtype, device=self.device)


class Pipeline:
    """One rank's end of the links, over its `rows`. What earlier users of the links left in them is dropped.

    cutter: the micro-batches that all stages agree on.
    """

    def __init__(self, setup: StageSetup, rows: DeviceRows) -> None:
        self.cutter = Cutter(setup.num_parts, setup.least_tokens)
        self._links = setup.links
        self._rows = rows
        # Of the first stage: how many micro-batches sampled, which one a slot's newest token comes from (-1: the host
        # knew it), and those whose tokens are under way.
        self._num_sampled = 0
        self._sampled_by: Int64 = np.full(rows.padding + 1, -1, dtype=np.int64)
        self._under_way: deque[tuple[int, Int32]] = deque()
        if setup.links.tokens_from_last is not None:
            setup.links.tokens_from_last.discard()

    def admitted(self, slots: Int32) -> None:
        """The slots are new rows', whose first tokens the host knows; what is under way for the old ones is not."""
        self._sampled_by[slots] = -1

    def receive(self, rows: StepRows) -> Tensor | None:
        """What the micro-batch is computed from: residuals [t, hidden], or None on the first stage: the rows' tokens.

        To be called when everything before it is launched.
        """
        before = self._links.before
        if before is None:
            needed = self._sampled_by[rows.slots[: rows.num_decode]].max(initial=-1)
            while self._under_way and self._under_way[0][0] <= needed:
                self._take_tokens()
            return None
        before.post(int(rows.firsts[-1] + rows.lengths[-1]))
        return before.take()

    def pass_on(self, rows: StepRows, hidden: Tensor | None, token_ids: Tensor | None) -> None:
        """The micro-batch is launched: its residuals, or what it sampled, go where they are needed."""
        links = self._links
        if links.after is not None:
            assert hidden is not None
            links.after.send(hidden)
        if links.before is not None:
            links.before.release()  # not before it is sent on: the stage may have added to what it received in place
        if links.tokens_to_first is not None and token_ids is not None:
            links.tokens_to_first.send(token_ids)
        if links.tokens_from_last is not None and rows.samples.any():
            self._expect_tokens(rows.slots[rows.samples])

    def _expect_tokens(self, slots: Int32) -> None:
        """Posts the receive at once: the last stage sends whether or not another step follows."""
        receiver = self._links.tokens_from_last
        assert receiver is not None
        while receiver.is_full:
            self._take_tokens()
        receiver.post(slots.size)
        self._under_way.append((self._num_sampled, slots))
        self._sampled_by[slots] = self._num_sampled
        self._num_sampled += 1

    def _take_tokens(self) -> None:
        """The oldest tokens under way become their slots' next ones, but for slots that others have now."""
        receiver = self._links.tokens_from_last
        assert receiver is not None
        number, slots = self._under_way.popleft()
        (slots_at,) = upload(
            (np.where(self._sampled_by[slots] == number, slots, self._rows.padding),), self._rows.device
        )
        self._rows.sampled(slots_at, receiver.take())
        receiver.release()
