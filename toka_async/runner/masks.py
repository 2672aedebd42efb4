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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32, Int64
from toka_async.grammars.matchers import Drawn, GrammarRow, MatchedRows, RowMatchers
from toka_async.runner.clock import Mark, mark
from toka_async.runner.copies import Download, upload
from toka_async.runner.rows import RowPrompt, RowTables

PART = 2048  # rows, whose masks are copied while those of the next ones are made
FEW = 32  # rows, whose masks take the device less time than it takes the host to use a stream beside


@dataclass(slots=True, frozen=True)
class _Part:
    """Rows whose masks are made and copied at once, at these places among the draw's rows. slots_at: int64 [r]."""

    places: Int64
    rows: MatchedRows
    slots_at: Tensor


@dataclass(slots=True, frozen=True)
class _Found:
    """The rows with a grammar among slots int32 [s]. stream: which copies their masks; None: the one that computes."""

    slots: Int32
    places: Int64
    rows: MatchedRows
    parts: list[_Part]
    stream: torch.cuda.Stream | None

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


@dataclass(slots=True)
class MaskedDraw:
    """The rows with a grammar in a draw; known once it is filled, but for slots.

    slots: int32 [s], of all rows of the draw. places: int64 [r], of those with a grammar. broken: places of rows whose
    grammar failed. seconds: of the host, waiting aside. stall: the time for which the device waited for the masks.
    """

    slots: Int32
    places: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    rows: MatchedRows | None = None
    broken: list[int] = field(default_factory=list)
    seconds: float = 0.0
    stall: tuple[Mark, Mark] | None = None


class GrammarMasks:
    """Fills `rows.masks`, int32 [max_seqs + 1, words], the bits of the ids that a slot's row may draw next."""

    def __init__(self, matchers: RowMatchers, rows: RowTables) -> None:
        self._matchers = matchers
        self._rows = rows
        self._copies: torch.cuda.Stream | None = None  # beside the stream that computes
        if rows.device.type == "cuda":
            self._copies = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        rows.masks = torch.zeros(rows.params.size + 1, matchers.num_words, dtype=torch.int32, device=rows.device)
        # Draws whose tokens the matchers do not have, and the number of the first of them.
        self._under_way: deque[tuple[MaskedDraw, Download]] = deque()
        self._num_taken = 0
        self._drawn_by: Int64 = np.full(rows.params.size, -1, np.int64)  # by slot, the number of its row's last draw
        self._found: _Found | None = None  # of the last draw: most have the same rows

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
        self._drawn_by[admitted] = -1
        self._found = None
        if started:
            self._matchers.admit(started)

    def select(self, slots: Int32) -> MaskedDraw | None:
        """Selects the rows with a grammar of a draw; None if there is none."""
        return MaskedDraw(slots) if len(self._matchers) and self._matchers.has_any(slots) else None

    def fill(self, draw: MaskedDraw) -> None:
        """Makes the masks for a draw that follows; its forward pass is launched. Waits for its rows' last tokens."""
        begin = mark() if self._copies is not None else None
        with _timed(draw):
            found = self._find(draw.slots)
        draw.places, draw.rows = found.places, found.rows
        newest = self._drawn_by[found.rows.slots].max()
        drawn: Drawn | None = None
        while self._under_way and self._num_taken <= newest:
            if drawn is not None:
                with _timed(draw):
                    self._matchers.advance(*drawn)
            last, download = self._under_way.popleft()
            self._num_taken += 1
            token_ids = download.collect()[0]
            assert last.rows is not None
            drawn = last.rows, token_ids[last.places]
        with _timed(draw):
            draw.broken = self._fill_table(found, drawn)
        if begin is not None:
            if found.stream is not None:
                torch.cuda.current_stream().wait_stream(found.stream)
            draw.stall = begin, mark()

    def follow(self, draw: MaskedDraw, download: Download) -> None:
        """Takes what brings the tokens that the draw's rows drew, int32 [s], before anything else."""
        assert draw.rows is not None
        self._drawn_by[draw.rows.slots] = self._num_taken + len(self._under_way)
        self._under_way.append((draw, download))
        if self._copies is not None:
            # A step may give a slot to a new row while the draw of the slot's last row is under way.
            self._copies.wait_stream(torch.cuda.current_stream())

    def _find(self, slots: Int32) -> _Found:
        if self._found is None or not np.array_equal(self._found.slots, slots):
            places = self._matchers.find(slots)
            rows = self._matchers.take(slots[places])
            self._found = found = _Found(slots, places, rows, [], self._copies if places.size > FEW else None)
            with found.copying():
                (slots_at,) = upload((rows.slots,), self._rows.device)
            for first in range(0, places.size, PART):
                part = slice(first, first + PART)
                own = rows if places.size <= PART else self._matchers.take(rows.slots[part])
                found.parts.append(_Part(places[part], own, slots_at[part]))
        return self._found

    def _fill_table(self, found: _Found, drawn: Drawn | None) -> list[int]:
        """Advances rows, makes masks and copies them to the device; returns the places of broken rows.

        The stream that copies has waited for the draws that read these slots' old masks (`follow`).
        """
        table, broken = self._rows.masks, list[int]()
        assert table is not None
        # Memory from which a GPU fetches on its own time is not used again before it has.
        made = [
            torch.empty(part.places.size, table.shape[1], dtype=torch.int32, pin_memory=table.is_cuda)
            for part in found.parts
        ]
        filled = self._matchers.fill_parts([part.rows for part in found.parts], [each.numpy() for each in made], drawn)
        for part, masks, failed in zip(found.parts, made, filled, strict=True):
            broken += part.places[failed].tolist()
            with found.copying():
                table.index_copy_(0, part.slots_at, masks.to(table.device, non_blocking=True))
        return broken


@contextmanager
def _timed(draw: MaskedDraw) -> Iterator[None]:
    begin = perf_counter()
    yield
    draw.seconds += perf_counter() - begin
