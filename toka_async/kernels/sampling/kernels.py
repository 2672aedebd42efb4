"""Samples many rows exactly on one GPU and reads the logits once.

Six kernels draw: `pilot`, `chunk_sums` and `repair` (stats.py), `gather`, `draw` and `reject` (files of like names).
Plain and greedy rows need the pass of `chunk_sums` and one line again. Filtered rows are settled by their likeliest
tokens or, where the distribution is flat, by bounds that the pilot guessed; the few others pass over their row again.
`measure` and `renormalize` (kept.py) are for rows that ask what their filters keep. Nothing waits for the host or
depends on its values: a CUDA graph can capture all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toka_async.kernels.launches.sizes import divide_up, round_to_power
from toka_async.kernels.sampling.candidates import gather
from toka_async.kernels.sampling.draw import draw
from toka_async.kernels.sampling.kept import measure, renormalize
from toka_async.kernels.sampling.reject import reject
from toka_async.kernels.sampling.row import LINE, NUM_STATS
from toka_async.kernels.sampling.stats import chunk_sums, pilot, repair

_PILOT_LINES = 64
_PART_LINES = 64  # lines that a pass of `reject` reads at once
# With more registers a thread, too few programs fit a processor to hide each other's waits for memory.
_SUMS: dict[str, int] = {"num_warps": 4, "maxnreg": 64}
_GATHER: dict[str, int] = {"num_warps": 4, "maxnreg": 96}


@dataclass(slots=True, frozen=True)
class RowTable:
    """Sampling parameters by slot, on the device, all contiguous.

    temperature, top_p, min_p, repetition: float32 [num_slots]; 1, 0 and 1 turn the last three off. top_k, flags,
    num_prompt: int32 [num_slots]; top_k 0 is off; flags: 1 draws at random (else the row is greedy), 2 has a filter,
    16 penalises repetition, 64 wants log-probs, 512 wants them after penalties and temperature, 1024 those of what its
    filters keep, 4096 has a mask, others are for `EditKernels`; num_prompt: tokens of the prompt. seeds: int64
    [num_slots].
    seen: int32 [num_slots, ceil(vocab / 32)], a bit for each token id of the prompt and the output,
    lowest first; read and written for rows that penalise repetition only.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    top_k: Tensor
    flags: Tensor
    num_prompt: Tensor
    seeds: Tensor
    seen: Tensor


class SamplingKernels:
    """Draws tokens of a vocabulary for up to `max_rows` rows at once; owns about 18 KiB of workspace a row.

    Filters (repetition penalty, temperature, min_p, top_k, top_p, in this order, each on the rest of the one before)
    keep the tokens that `model.sampling` keeps, ties included. Sums are float32 here and float64 there, so a token that
    is within rounding of the edge of top_p may differ. A number draws the same token too, except where a row's filters
    keep more than `num_candidates` tokens: there it draws another token of the same distribution.

    Args:
        chunk: ids whose weights are summed together, a power of two of at least 64.
        num_candidates: how many of the likeliest tokens filters look at first, a power of two.
    """

    def __init__(
        self, vocab_size: int, max_rows: int, device: torch.device, *, chunk: int = 4096, num_candidates: int = 64
    ) -> None:
        line = int(LINE.value)
        assert chunk % line == 0
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self._chunk_lines = chunk // line
        self._part_lines = min(_PART_LINES, self._chunk_lines)
        self._num_lines = divide_up(vocab_size, line)
        self._num_chunks = divide_up(vocab_size, chunk)
        self._num_candidates = num_candidates

        def floats(*shape: int) -> Tensor:
            return torch.zeros(max_rows, *shape, dtype=torch.float32, device=device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(max_rows, *shape, dtype=torch.int32, device=device)

        self.bounds = floats(2)
        self._stats = floats(int(NUM_STATS.value), self._num_chunks)
        self.maxima = floats(self._num_lines)
        self._sums = floats(self._num_lines)
        self.picks = integers(num_candidates)
        self._num_sure = integers()
        self._candidates = integers(2 * num_candidates), floats(2 * num_candidates)
        self._proposals = integers()

    def draw(self, logits: Tensor, slots: Tensor, contexts: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
        """Draws one token for each row, and sets its bit in `table.seen` for rows that penalise repetition.

        NaN logits count as -inf, +inf as the largest finite number; a row without any finite logit gives id 0.

        Args:
            logits: [s, vocab], bfloat16, float16 or float32, contiguous in rows, from an address that is a multiple
                of 16; not changed.
            slots: int64 [s], rows of the table; those that penalise repetition are distinct.
            contexts: int32 [s], tokens of the row so far, at least num_prompt: the draw has number
                contexts - num_prompt of the row's random stream (`model.rng`).

        Returns:
            Token ids, int64 [s], and their log-probs, float32 [s], for rows that want them; 0 for others.
        """
        return self._draw(logits, slots, contexts, table, None)

    def draw_measured(
        self, logits: Tensor, slots: Tensor, contexts: Tensor, table: RowTable, masks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draws as `draw` does, and measures the filters of rows that ask for it.

        Args:
            masks: int32 [num_slots, ceil(vocab / 32)], contiguous, a bit for each id, lowest first: ids without one
                count as -inf for rows flagged MASKED, and nothing is read for others. None: no row is.

        Returns:
            Token ids and log-probs before filters, as `draw` does; how many tokens the filters keep, int32 [s], and
            their share of the distribution, float32 [s]: 0 and 1 for rows that do not ask.
        """
        kept = torch.empty(len(slots), dtype=torch.int32, device=logits.device)
        masses = torch.empty(len(slots), dtype=torch.float32, device=logits.device)
        return *self._draw(logits, slots, contexts, table, masks, (kept, masses)), kept, masses

    def renormalize(self, kept: Tensor, masses: Tensor, logprobs: Tensor, top_values: Tensor) -> None:
        """Changes log-probs in place to those of the tokens that filters keep, for rows that ask what they keep.

        Args:
            kept, masses, logprobs: of `draw_measured`.
            top_values: float32 [s, k], contiguous, log-probs before filters of the likeliest tokens, likeliest first.
        """
        num_rows, num_top = top_values.shape
        if num_rows:
            padded_top = round_to_power(num_top)
            renormalize[(num_rows,)](
                kept, masses, logprobs, top_values, num_top=num_top, padded_top=padded_top, num_warps=1
            )

    def _draw(
        self,
        logits: Tensor,
        slots: Tensor,
        contexts: Tensor,
        table: RowTable,
        masks: Tensor | None,
        measured: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        num_rows = logits.shape[0]
        assert num_rows <= self.max_rows
        assert logits.shape[1] == self.vocab_size
        assert logits.stride(1) == 1
        assert logits.data_ptr() % 16 == 0  # other addresses would rebuild the kernels
        assert slots.shape == contexts.shape == (num_rows,)
        assert masks is None or masks.stride() == table.seen.stride()
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        if num_rows:
            shape = self._shape(logits, table)
            self._pass_over(logits, slots, table, masks, shape)
            if measured is not None:
                self._measure(logits, slots, table, masks, measured)
            self._choose(logits, slots, contexts, table, masks, (token_ids, logprobs), shape)
        return token_ids, logprobs

    def _measure(
        self, logits: Tensor, slots: Tensor, table: RowTable, masks: Tensor | None, output: tuple[Tensor, Tensor]
    ) -> None:
        """Stores what filters keep, after the pass over the rows."""
        measure[(len(slots),)](
            logits,
            slots,
            table.flags,
            table.temperature,
            table.top_p,
            table.min_p,
            table.top_k,
            table.repetition,
            table.seen,
            masks,
            self._stats,
            self._num_sure,
            *self._candidates,
            *output,
            num_chunks=self._num_chunks,
            padded_chunks=round_to_power(self._num_chunks),
            part_lines=self._part_lines,
            num_parts=divide_up(self._num_lines, self._part_lines),
            num_candidates=self._num_candidates,
            num_warps=8,
            **self._shape(logits, table),
        )

    def _pass_over(
        self, logits: Tensor, slots: Tensor, table: RowTable, masks: Tensor | None, shape: dict[str, int | float]
    ) -> None:
        """Computes the rows' sums, maxima and likeliest tokens."""
        num_rows = logits.shape[0]
        filters = (
            table.flags,
            table.temperature,
            table.top_p,
            table.min_p,
            table.top_k,
            table.repetition,
            table.seen,
            masks,
        )
        pilot[(num_rows,)](
            logits,
            slots,
            *filters,
            self.bounds,
            num_lines=self._num_lines,
            pilot_lines=_PILOT_LINES,
            num_candidates=self._num_candidates,
            num_warps=4,
            **shape,
        )
        chunks = {"num_chunks": self._num_chunks, "chunk_lines": self._chunk_lines, "num_lines": self._num_lines}
        padded_chunks = round_to_power(self._num_chunks)
        summed = (
            logits,
            slots,
            table.flags,
            table.temperature,
            table.repetition,
            table.seen,
            masks,
            self.bounds,
            self._stats,
            self.maxima,
            self._sums,
        )
        chunk_sums[(num_rows * self._num_chunks,)](*summed, **_SUMS, **chunks, **shape)
        repair[(num_rows,)](*summed, padded_chunks=padded_chunks, num_warps=4, **chunks, **shape)
        gather[(num_rows,)](
            logits,
            slots,
            *filters,
            self._stats,
            self.maxima,
            self.picks,
            self._num_sure,
            *self._candidates,
            num_lines=self._num_lines,
            padded_lines=round_to_power(self._num_lines),
            num_chunks=self._num_chunks,
            padded_chunks=padded_chunks,
            num_candidates=self._num_candidates,
            **_GATHER,
            **shape,
        )

    def _choose(
        self,
        logits: Tensor,
        slots: Tensor,
        contexts: Tensor,
        table: RowTable,
        masks: Tensor | None,
        output: tuple[Tensor, Tensor],
        shape: dict[str, int | float],
    ) -> None:
        num_rows = logits.shape[0]
        row = (
            logits,
            slots,
            contexts,
            table.flags,
            table.temperature,
            table.top_p,
            table.min_p,
            table.top_k,
            table.repetition,
            table.num_prompt,
            table.seeds,
            table.seen,
            masks,
        )
        chunks = {"num_chunks": self._num_chunks, "padded_chunks": round_to_power(self._num_chunks)}
        draw[(num_rows,)](
            *row,
            self.bounds,
            self._stats,
            self.maxima,
            self._sums,
            self._num_sure,
            *self._candidates,
            self._proposals,
            *output,
            num_lines=self._num_lines,
            chunk_lines=self._chunk_lines,
            num_candidates=self._num_candidates,
            num_warps=1,
            **chunks,
            **shape,
        )
        num_parts = divide_up(self._num_lines, self._part_lines)
        reject[(num_rows,)](
            *row,
            self._stats,
            self._proposals,
            *output,
            part_lines=self._part_lines,
            num_parts=num_parts,
            padded_parts=round_to_power(num_parts),
            num_warps=8,
            **chunks,
            **shape,
        )

    def _shape(self, logits: Tensor, table: RowTable) -> dict[str, int | float]:
        """Returns the constants of all kernels: a kernel is built once for each dtype and row stride of the logits.

        `seen_stride` is that of masks too.
        """
        return {
            "vocab": self.vocab_size,
            "stride": logits.stride(0),
            "seen_stride": table.seen.stride(0),
            "largest": torch.finfo(logits.dtype).max,
        }
