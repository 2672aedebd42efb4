"""Samples with plain torch, on any device and with every parameter: all rows on a CPU, rare rows elsewhere.

Works in slabs of rows, so that only a bounded part of rows x vocabulary is in memory at once. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Float32, Int32, Int64
from toka_async.attention.copies import to_device
from toka_async.model import penalties
from toka_async.model.logprobs import (
    Logprobs,
    concatenate,
    distribution,
    keep_only_filtered,
    select_logprobs,
    take,
)
from toka_async.model.penalties import Penalties
from toka_async.model.rng import Float64, draw_uniforms
from toka_async.model.sampling import EDITS, Flag, Params, clean, measure_filters, sample
from toka_async.runner.copies import upload
from toka_async.runner.rows import RowTables
from toka_async.runner.samples import NO_ROWS, Draws, make_draws
from toka_async.runner.token_history import TokenHistory

# Float32 logits of one slab; sorting a whole vocabulary takes more than ten times as much.
SLAB_BYTES = {"cpu": 32 << 20, "cuda": 1 << 28}

Head = Callable[[Tensor], Tensor]
SlabDraw = Callable[[Tensor, Params, Float64], Tensor]  # as `model.sampling.sample`


def cut_slabs(num_rows: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    """Cuts `num_rows` rows into parts whose logits fit into a slab."""
    size = max(1, SLAB_BYTES[device.type] // (4 * vocab_size))
    return (slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size))


@dataclass(slots=True, frozen=True)
class SampledRows:
    """The rows of one call, on the host, [s] each. needed: the flags of all rows together."""

    slots: Int32
    lengths: Int64
    params: Params
    uniform: Float64
    needed: int


class SlabSampler:
    """Implements `Sampler` with the vocabulary's head, over the tables of `rows` and `history`."""

    def __init__(self, head: Head, rows: RowTables, history: TokenHistory, draw: SlabDraw = sample) -> None:
        self._head = head
        self._draw = draw
        self._rows = rows
        self._history = history

    def sample(
        self,
        hidden: Tensor,
        slots: Int32,
        lengths: Int64,
        slots_at: Tensor,  # noqa: ARG002
        lengths_at: Tensor,  # noqa: ARG002
        before_draw: Callable[[], None] | None = None,
    ) -> Draws:
        """See `Sampler`; the columns on the device are not needed."""
        if before_draw is not None:
            before_draw()
        table = self._rows
        params = table.params[slots]
        needed = int(np.bitwise_or.reduce(params["flags"]))
        # Draw i of a row's stream is for its output token i, even when that is computed again.
        uniform = draw_uniforms(table.seeds[slots], lengths - table.num_prompt[slots]) if needed & Flag.RANDOM else None
        rows = SampledRows(slots, lengths, params, np.zeros(slots.size) if uniform is None else uniform, needed)
        parts = cut_slabs(slots.size, table.vocab_size, hidden.device)
        tokens, logprobs = zip(*(self._sample_slab(hidden, rows, part) for part in parts), strict=True)
        asked = np.flatnonzero(params["flags"] & Flag.LOGPROBS) if needed & Flag.LOGPROBS else NO_ROWS
        values = [part for part in logprobs if part is not None]
        token_ids = torch.cat(tokens) if len(tokens) > 1 else tokens[0]
        return make_draws(token_ids, asked, params["num_logprobs"][asked], concatenate(values) if values else None)

    def _sample_slab(self, hidden: Tensor, rows: SampledRows, part: slice) -> tuple[Tensor, Logprobs | None]:
        """Samples some rows. Returns token ids int64, and the log-probs of those rows that ask."""
        logits = clean(self._head(hidden if part == slice(0, rows.slots.size) else hidden[part]))
        params = rows.params[part]
        flags = params["flags"]
        asked = np.flatnonzero(flags & Flag.LOGPROBS) if rows.needed & Flag.LOGPROBS else NO_ROWS
        of_model = asked[(flags[asked] & Flag.SCALED) == 0]
        (model_at,) = upload((of_model,), logits.device)
        raw = distribution(logits[model_at]) if of_model.size else None  # before any edit
        if rows.needed & EDITS:
            logits = logits.float()
            _edit(logits, self._rows, self._history, rows.slots[part], rows.lengths[part])
        tokens = self._draw(logits, params, rows.uniform[part])
        if not asked.size:
            return tokens, None
        parts = [] if raw is None else [select_logprobs(raw, tokens[model_at], params["num_logprobs"][of_model])]
        places = [of_model]
        for kept in (False, True) if rows.needed & Flag.SCALED else ():
            own = asked[(flags[asked] & (Flag.SCALED | Flag.KEPT)) == (Flag.SCALED | Flag.KEPT * kept)]
            if own.size:
                parts.append(_measure(logits, tokens, params, own))
                places.append(own)
        logprobs = concatenate(parts)
        if len(parts) > 1:
            (order,) = upload((np.argsort(np.concatenate(places)),), logits.device)
            logprobs = take(logprobs, order)
        return tokens, logprobs


def _measure(logits: Tensor, tokens: Tensor, params: Params, rows: Int64) -> Logprobs:
    """Computes log-probs of tokens [s] in the distributions of `rows` [r], which are all filtered and kept, or none.

    logits: [s, vocab], as the tokens were drawn from them.
    """
    own = params[rows]
    (at,) = upload((rows,), logits.device)
    logits, tokens = logits[at], tokens[at]
    temperature = np.where(own["flags"] & Flag.RANDOM, own["temperature"], np.float32(1))
    values = distribution(logits, to_device(temperature, logits.device))
    logprobs = select_logprobs(values, tokens, own["num_logprobs"])
    return keep_only_filtered(logprobs, *measure_filters(logits, own)) if own["flags"][0] & Flag.KEPT else logprobs


def _edit(logits: Tensor, rows: RowTables, history: TokenHistory, slots: Int32, lengths: Int64) -> None:
    """Changes float32 logits [s, vocab] in place, as the rows' parameters say.

    Args:
        slots: int32 [s].
        lengths: int64 [s], tokens of the row so far; all are in the cache.
    """
    params = rows.params[slots]
    flags = params["flags"]
    if (flags & Flag.ALLOWED).any():
        _keep_allowed(logits, rows, slots, params)
    if (flags & (Flag.BIASED | Flag.MIN_TOKENS)).any():
        _add_bias(logits, rows, slots, params, lengths)
    if (flags & Flag.MASKED).any():
        assert rows.masks is not None
        masked = np.flatnonzero(flags & Flag.MASKED)
        masked_at, slots_at = upload((masked, slots[masked]), logits.device)
        penalties.apply_masks(logits, masked_at, rows.masks.index_select(0, slots_at))
    penalised = np.flatnonzero(flags & (Flag.REPETITION | Flag.COUNTED))
    if penalised.size == slots.size:
        _penalise(logits, rows, history, slots, params, lengths)
    elif penalised.size:
        (at,) = upload((penalised,), logits.device)
        part = logits[at]
        _penalise(part, rows, history, slots[penalised], params[penalised], lengths[penalised])
        logits[at] = part


def _keep_allowed(logits: Tensor, rows: RowTables, slots: Int32, params: Params) -> None:
    """Sets -inf for tokens that a row does not allow."""
    limited = np.flatnonzero(params["flags"] & Flag.ALLOWED)
    ids = [prompt.allowed_ids for prompt in rows.prompts[slots[limited]]]
    at = np.repeat(limited, [part.size for part in ids])
    rows_at, places_at, ids_at = upload((limited, at, np.concatenate(ids)), logits.device)
    penalties.keep_only(logits, rows_at, places_at, ids_at)


def _add_bias(logits: Tensor, rows: RowTables, slots: Int32, params: Params, lengths: Int64) -> None:
    """Adds the bias, and -inf for the end tokens of rows that have fewer than min_tokens."""
    early = lengths - rows.num_prompt[slots] < params["min_tokens"]
    biased = np.flatnonzero(params["flags"] & Flag.BIASED)
    held = np.flatnonzero(((params["flags"] & Flag.MIN_TOKENS) != 0) & early)
    prompts = rows.prompts[slots]
    ids: list[Int32] = [*(p.bias_ids for p in prompts[biased]), *(p.end_ids for p in prompts[held])]
    values: list[Float32] = [p.bias for p in prompts[biased]]
    values += [np.full(p.end_ids.size, -np.inf, dtype=np.float32) for p in prompts[held]]
    if not ids:
        return
    at = np.repeat(np.concatenate([biased, held]), [part.size for part in ids])
    rows_at, ids_at = upload((at, np.concatenate(ids)), logits.device)
    penalties.add_bias(logits, rows_at, ids_at, to_device(np.concatenate(values), logits.device))


def _penalise(
    logits: Tensor, rows: RowTables, history: TokenHistory, slots: Int32, params: Params, lengths: Int64
) -> None:
    slots_at, lengths_at, num_prompt = upload((slots, lengths, rows.num_prompt[slots]), logits.device)
    width = -(-int(lengths.max()) // rows.page_size)
    floats = np.stack([params[name] for name in ("presence", "frequency", "repetition")])
    seen = Penalties(
        history.gather(rows.on_device.page_table[:, :width].index_select(0, slots_at)),
        lengths_at,
        num_prompt,
        *to_device(floats, logits.device),
    )
    if (params["flags"] & Flag.REPETITION).any():
        penalties.apply_repetition(logits, seen)
    if (params["flags"] & Flag.COUNTED).any():
        penalties.subtract_counts(logits, seen)
