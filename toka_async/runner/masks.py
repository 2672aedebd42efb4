"""Lets rows with a grammar draw only what it allows, while the device computes what they draw from.

A step's forward pass is launched before anybody knows the tokens that the step before drew. Only then does the host
wait for these tokens, as far as rows with a grammar drew them. It advances the grammars, makes masks, and copies them
to the device on a stream beside the one that computes, which waits for them before the draw. So the device always has
the forward pass to do meanwhile, also while a new grammar is compiled, and rows without a grammar have no part in this.
Knows slots and token ids; knows no model and no sampling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32, Int64
from toka_async.grammars.matchers import GrammarRow, MatchedRow, RowMatchers
from toka_async.runner.clock import Mark, mark
from toka_async.runner.copies import Download, upload
from toka_async.runner.rows import RowPrompt, RowTables


@dataclass(slots=True)
class MaskedDraw:
    """The rows with a grammar in a draw; known once it is filled, but for slots.

    slots: int32 [s], of all rows of the draw. places: int64 [r], of those with a grammar. broken: places of rows whose
    grammar failed. seconds: of the host, waiting aside. stall: the time for which the device waited for the masks.
    """

    slots: Int32
    places: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    rows: list[MatchedRow] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    seconds: float = 0.0
    stall: tuple[Mark, Mark] | None = None


class GrammarMasks:
    """Fills `rows.masks`, int32 [max_seqs + 1, words], the bits of the ids that a slot's row may draw next.

    copies: a stream beside the one that computes; None on a CPU.
    """

    def __init__(self, matchers: RowMatchers, rows: RowTables, copies: torch.cuda.Stream | None) -> None:
        self._matchers = matchers
        self._rows = rows
        self._copies = copies
        rows.masks = torch.zeros(rows.params.size + 1, matchers.num_words, dtype=torch.int32, device=rows.device)
        # Draws whose tokens the matchers do not have, and the number of the first of them.
        self._under_way: deque[tuple[list[MatchedRow], Download]] = deque()
        self._num_taken = 0

    def apply(self, freed: Int32, admitted: Int32) -> None:
        """Forgets the freed slots' rows, and takes the admitted ones that have a grammar."""
        self._matchers.free(freed)
        self._matchers.free(admitted)
        prompts: Sequence[RowPrompt] = self._rows.prompts[admitted].tolist()
        started = [
            GrammarRow(slot, prompt.grammar, prompt.token_ids[prompt.num_prompt :], int(prompt.params["min_tokens"][0]))
            for slot, prompt in zip(admitted.tolist(), prompts, strict=True)
            if prompt.grammar
        ]
        if started:
            self._matchers.admit(started)

    def select(self, slots: Int32) -> MaskedDraw | None:
        """Selects the rows with a grammar of a draw; None if there is none."""
        return MaskedDraw(slots) if len(self._matchers) and self._matchers.has_any(slots) else None

    def fill(self, draw: MaskedDraw) -> None:
        """Makes the masks for a draw that follows; its forward pass is launched. Waits for its rows' last tokens."""
        draw.places = self._matchers.find(draw.slots)
        draw.rows = self._matchers.take(draw.slots[draw.places])
        newest = max(row.drawn_by for row in draw.rows)
        while self._under_way and self._num_taken <= newest:
            rows, download = self._under_way.popleft()
            self._num_taken += 1
            (token_ids,) = download.collect()
            with _timed(draw):
                self._matchers.advance(rows, token_ids)
        with _timed(draw):
            # Memory from which a GPU fetches on its own time is not used again before it has.
            pinned = self._copies is not None
            masks = torch.empty(len(draw.rows), self._matchers.num_words, dtype=torch.int32, pin_memory=pinned)
            draw.broken = draw.places[self._matchers.fill(draw.rows, masks.numpy())].tolist()
        self._copy(draw, masks)

    def follow(self, draw: MaskedDraw, token_ids: Tensor) -> None:
        """Takes the tokens int64 [s] that the draw's rows drew, once they are needed."""
        (at,) = upload((draw.places,), token_ids.device)
        number = self._num_taken + len(self._under_way)
        for row in draw.rows:
            row.drawn_by = number
        download = Download([token_ids.index_select(0, at).to(torch.int32)], self._copies)
        self._under_way.append((draw.rows, download))

    def _copy(self, draw: MaskedDraw, masks: Tensor) -> None:
        table = self._rows.masks
        assert table is not None
        if self._copies is None:
            (slots_at,) = upload((draw.slots[draw.places],), table.device)
            table.index_copy_(0, slots_at, masks)
            return
        # The rows' former draws are done, since their tokens are known: nothing reads these slots' masks.
        with torch.cuda.stream(self._copies):
            (slots_at,) = upload((draw.slots[draw.places],), table.device)
            table.index_copy_(0, slots_at, masks.to(table.device, non_blocking=True))
        begin = mark()
        torch.cuda.current_stream().wait_stream(self._copies)
        draw.stall = begin, mark()


@contextmanager
def _timed(draw: MaskedDraw) -> Iterator[None]:
    begin = perf_counter()
    yield
    draw.seconds += perf_counter() - begin
