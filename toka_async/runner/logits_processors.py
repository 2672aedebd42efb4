"""Edits logits before the draw: allowed tokens, bias, forbidden end tokens and penalties (`model.penalties`).

Only rows that ask for an edit cost anything. Knows slots and prompts.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from toka_async.arrays import Float32, Int32, Int64
from toka_async.attention.copies import to_device
from toka_async.model import penalties
from toka_async.model.penalties import Penalties
from toka_async.model.sampling import Flag, Params
from toka_async.runner.copies import upload
from toka_async.runner.rows import RowTables
from toka_async.runner.token_history import TokenHistory


def edit(logits: Tensor, rows: RowTables, history: TokenHistory, slots: Int32, lengths: Int64) -> None:
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
