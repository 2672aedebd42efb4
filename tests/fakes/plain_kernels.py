"""`SamplingKernels` and `EditKernels` in plain torch on a CPU, for tests of what is around them.

They read and write the same tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from toka_async.model.logprobs import distribution
from toka_async.model.penalties import apply_masks
from toka_async.model.rng import draw_uniforms
from toka_async.model.sampling import PARAMS, Flag, Params, clean, find_likeliest, measure_filters, sample

if TYPE_CHECKING:  # needs Triton
    from toka_async.kernels.sampling.edit import EditTable, RowTokens
    from toka_async.kernels.sampling.kernels import RowTable

_NAMES = ("temperature", "top_p", "min_p", "repetition", "top_k", "flags")


class PlainKernels:
    """Knows of a row what its slot's line of the table says, and nothing else."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        assert device.type == "cpu"
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self._params = np.zeros(0, dtype=PARAMS)
        self._penalised = torch.empty(0)

    def draw(self, logits: Tensor, slots: Tensor, contexts: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
        """See `SamplingKernels.draw`."""
        num_rows = len(slots)
        assert num_rows <= self.max_rows
        assert logits.shape == (num_rows, self.vocab_size)
        assert contexts.dtype == torch.int32
        params = self.params_of(slots, table)
        logits = clean(logits.clone())
        penalises = torch.from_numpy((params["flags"] & Flag.REPETITION) != 0)
        penalised = self.penalise(logits, slots, table, params)
        numbers = (contexts - table.num_prompt[slots]).long().numpy()
        token_ids = sample(penalised, params, draw_uniforms(table.seeds[slots].numpy(), numbers))
        for slot, token in zip(slots[penalises].tolist(), token_ids[penalises].tolist(), strict=True):
            table.seen[slot, token // 32] |= torch.tensor(1 << token % 32).to(torch.int32)
        asks = torch.from_numpy((params["flags"] & Flag.LOGPROBS) != 0)
        self._params, self._penalised = params, penalised
        raw, scaled = (values.gather(1, token_ids[:, None])[:, 0] for values in (distribution(logits), self.scaled()))
        logprobs = torch.where(torch.from_numpy((params["flags"] & Flag.SCALED) != 0), scaled, raw)
        return token_ids, torch.where(asks, logprobs, 0.0)

    def scaled(self) -> Tensor:
        """Log-probs of the newest draw's distributions before filters, [s, vocab]."""
        return scaled_distribution(self._penalised, self._params)

    def draw_measured(
        self, logits: Tensor, slots: Tensor, contexts: Tensor, table: RowTable, masks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `SamplingKernels.draw_measured`."""
        logits = _forbid(logits, slots, table, masks)
        token_ids, logprobs = self.draw(logits, slots, contexts, table)
        kept, masses = torch.zeros(len(slots), dtype=torch.int32), torch.ones(len(slots))
        rows = np.flatnonzero(self._params["flags"] & Flag.KEPT)
        if rows.size:
            count, mass = measure_filters(self._penalised[torch.from_numpy(rows)], self._params[rows])
            kept[rows], masses[rows] = count.to(torch.int32), mass.float()
        return token_ids, logprobs, kept, masses

    def renormalize(self, kept: Tensor, masses: Tensor, logprobs: Tensor, top_values: Tensor) -> None:
        """See `SamplingKernels.renormalize`."""
        shift = masses.log()
        logprobs.sub_(shift)
        top_values.sub_(shift[:, None])
        left_out = (torch.arange(top_values.shape[1]) >= kept[:, None]) & (kept > 0)[:, None]
        top_values.masked_fill_(left_out, torch.finfo(torch.float32).min)

    def params_of(self, slots: Tensor, table: RowTable) -> Params:
        """What the table says of slots, PARAMS [s]."""
        params = np.zeros(len(slots), dtype=PARAMS)
        for name in _NAMES:
            params[name] = getattr(table, name)[slots].numpy()
        return params

    def penalise(self, logits: Tensor, slots: Tensor, table: RowTable, params: Params) -> Tensor:
        """Logits [s, vocab] after the repetition penalty."""
        penalises = torch.from_numpy((params["flags"] & Flag.REPETITION) != 0)
        return torch.where(penalises[:, None] & self.seen(table)[slots], _penalised(logits, params), logits)

    def seen(self, table: RowTable) -> Tensor:
        """The bits of the table: bool [slots, vocab]."""
        bits = np.unpackbits(table.seen.numpy().view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : self.vocab_size].astype(np.bool_))


_RAW, _TOP = 256, 2048
_NUM_TOP = 20


class PlainEditKernels:
    """Edits one row after the other. Knows of it what its slot's lines of the tables say."""

    def __init__(self, kernels: PlainKernels, num_cells: int, device: torch.device) -> None:  # noqa: ARG002
        assert device.type == "cpu"
        self._kernels = kernels
        self._raw = torch.empty(0)

    def edit(
        self,
        logits: Tensor,
        slots: Tensor,
        contexts: Tensor,
        table: RowTable,
        edits: EditTable,
        tokens: RowTokens,
        masks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `EditKernels.edit`."""
        self._raw = distribution(clean(logits.clone()))
        for x, slot, context in zip(logits, slots.tolist(), contexts.tolist(), strict=True):
            flags, num_prompt = int(table.flags[slot]), int(table.num_prompt[slot])
            num_bias, ids = int(edits.num_bias[slot]), edits.ids[slot].long()
            if flags & Flag.BIASED:
                x[ids[:num_bias]] += edits.values[slot, :num_bias]
            if flags & Flag.COUNTED:
                of_row = tokens.history[tokens.page_table[slot].long()].flatten()[num_prompt:context]
                self._subtract(x, of_row.long(), slot, table, edits)
            if flags & Flag.MIN_TOKENS and context - num_prompt < int(edits.min_tokens[slot]):
                x[ids[num_bias : num_bias + int(edits.num_ends[slot])]] = -torch.inf
        params = self._kernels.params_of(slots, table)
        allowed = clean(_forbid(logits.clone(), slots, table, masks))
        after = scaled_distribution(self._kernels.penalise(allowed, slots, table, params), params)
        is_top = torch.from_numpy((params["flags"] & _TOP) != 0)
        values, likeliest = find_likeliest(
            torch.where(is_top[:, None], after, self._raw), min(_NUM_TOP, logits.shape[1])
        )
        return likeliest.to(torch.int32), values

    def restore(
        self,
        logits: Tensor,  # noqa: ARG002
        slots: Tensor,
        contexts: Tensor,  # noqa: ARG002
        table: RowTable,
        edits: EditTable,  # noqa: ARG002
        tokens: RowTokens,  # noqa: ARG002
        drawn: tuple[Tensor, Tensor],
        masks: Tensor | None = None,  # noqa: ARG002
    ) -> None:
        """See `EditKernels.restore`."""
        raw = (table.flags[slots] & _RAW) != 0
        drawn[1][raw] = self._raw.gather(1, drawn[0][:, None])[raw, 0]

    @staticmethod
    def _subtract(x: Tensor, output: Tensor, slot: int, table: RowTable, edits: EditTable) -> None:
        ids, counts = torch.unique(output, return_counts=True)
        values = x[ids]
        if int(table.flags[slot]) & Flag.REPETITION:
            values = torch.where(values > 0, values / table.repetition[slot], values * table.repetition[slot])
            for token in ids.tolist():
                table.seen[slot, token // 32] &= ~torch.tensor(1 << token % 32).to(torch.int32)
        x[ids] = values - edits.presence[slot] - counts * edits.frequency[slot]


def _forbid(logits: Tensor, slots: Tensor, table: RowTable, masks: Tensor | None) -> Tensor:
    """Logits [s, vocab], with -inf where masks forbid an id."""
    if masks is None:
        return logits
    rows = torch.nonzero(table.flags[slots] & int(Flag.MASKED))[:, 0]
    logits = logits.clone()
    apply_masks(logits, rows, masks[slots[rows]])
    return logits


def scaled_distribution(logits: Tensor, params: Params) -> Tensor:
    """Log-probs [s, vocab] of logits after penalties, at the rows' temperatures."""
    temperature = np.where(params["flags"] & Flag.RANDOM, params["temperature"], np.float32(1))
    return distribution(logits, torch.from_numpy(temperature))


def _penalised(logits: Tensor, params: Params) -> Tensor:
    penalty = torch.from_numpy(params["repetition"].copy())[:, None]
    return torch.where(logits > 0, logits / penalty, logits * penalty)
