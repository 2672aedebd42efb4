"""Begins a step in one kernel: reads the rows' tables, writes what the step's layers need.

In plain torch it takes a dozen kernels, each of which costs a step of few tokens about as much as this one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up

NEXT_TOKEN = tl.constexpr(-1)  # in place of a token id: the slot's next token, which only the device knows
_ROWS = 128  # of a program


def begin_rows(
    order: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    page_table: Tensor,
    page_size: int,
    history: Tensor | None = None,
    given: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Takes the next token of each row in order, and counts it among the slot's computed tokens.

    order: int64 [n], slots, all but the padding slot distinct. last_tokens, positions: int64 [slots + 1], with the
    padding slot last, whose position stays. page_table: int32 [slots + 1, width]. history: int32 [pages, page_size],
    which gets the tokens' ids; None: nothing keeps them. given: int32 [n] each, token ids or NEXT_TOKEN, and positions,
    in place of the slots' own; then a slot may have several tokens one after the other, and `order` is int32.

    Returns the rows' token ids, positions and write indices (page * page_size + offset), int64 [n], and contexts,
    int32 [n].
    """
    num_rows = len(order)
    token_ids, own_positions, write_indices = (torch.empty_like(order, dtype=torch.int64) for _ in range(3))
    contexts = torch.empty(num_rows, dtype=torch.int32, device=order.device)
    assert page_table.is_contiguous()
    if num_rows:
        _begin[(divide_up(num_rows, _ROWS),)](
            order,
            last_tokens,
            positions,
            page_table,
            history,
            *(given or (None, None)),
            token_ids,
            own_positions,
            write_indices,
            contexts,
            num_rows,
            page_table.shape[1],
            len(positions) - 1,
            page_size=page_size,
            has_history=history is not None,
            are_given=given is not None,
            rows=_ROWS,
            num_warps=4,
        )
    return token_ids, own_positions, write_indices, contexts


@launch_quickly
@triton.jit(do_not_specialize=["num_rows", "width", "padding"])
def _begin(
    order,
    last_tokens,
    positions,
    page_table,
    history,
    given_ids,
    given_positions,
    token_ids,
    own_positions,
    write_indices,
    contexts,
    num_rows,
    width,
    padding,
    page_size: tl.constexpr,
    has_history: tl.constexpr,
    are_given: tl.constexpr,
    rows: tl.constexpr,
):
    """One program begins `rows` rows."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = row < num_rows
    slot = tl.load(order + row, mask=inside, other=0).to(tl.int64)
    token = tl.load(last_tokens + slot, mask=inside, other=0)
    is_last = inside & (slot != padding)  # of the slot's tokens
    if are_given:
        token_id = tl.load(given_ids + row, mask=inside, other=0)
        token = tl.where(token_id == NEXT_TOKEN, token, token_id)
        position = tl.load(given_positions + row, mask=inside, other=0).to(tl.int64)
        is_last = is_last & (tl.load(order + row + 1, mask=row + 1 < num_rows, other=-1) != slot)
    else:
        position = tl.load(positions + slot, mask=inside, other=0)
    place = position // page_size
    page = tl.load(page_table + slot * width + place, mask=inside, other=0).to(tl.int64)
    index = page * page_size + position % page_size
    tl.store(token_ids + row, token, mask=inside)
    tl.store(own_positions + row, position, mask=inside)
    tl.store(write_indices + row, index, mask=inside)
    tl.store(contexts + row, (position + 1).to(tl.int32), mask=inside)
    tl.store(positions + slot, position + 1, mask=is_last)
    if has_history:
        tl.store(history + index, token.to(tl.int32), mask=inside)
