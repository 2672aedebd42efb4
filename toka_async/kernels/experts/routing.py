"""Chooses each token's experts, and orders the (token, expert) pairs by expert. The host waits for nothing.

A counting sort: `route` counts the pairs of each of its programs, `place` sums the counts and gives each pair a place.
Nothing depends on which program runs first, and the grids depend on the number of tokens alone, so both can be captured
in graphs. Knows no matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.launches.pdl import can_follow, follow
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power

_ROWS = 16  # tokens that a program handles at once, at most,
_CELLS = 2048  # and their logits
_MOST_PROGRAMS = 128  # each of which reads the counts of all others
_COUNTS = 16  # programs whose counts are summed at once


@dataclass(slots=True, frozen=True)
class Routes:
    """Each token's experts, likeliest first; of equal ones the lower number.

    ids: int32 [t, k]. shares: float32 [t, k], with which the experts' outputs are summed. counts: int32 [programs,
    experts], pairs of the tokens of each program of `route`.
    """

    ids: Tensor
    shares: Tensor
    counts: Tensor


@dataclass(slots=True, frozen=True)
class Placement:
    """The pairs in the order of experts, then of tokens; a pair is token * k + the expert's place among the token's.

    pairs: int32 [t * k], the pair at each place; those of other ranks' experts are left out, and the last places are
    then unset. places: int32 [t * k], the place of each pair, or -1. ends: int32 [experts], of each expert's places.
    """

    pairs: Tensor
    places: Tensor
    ends: Tensor


def route(
    logits: Tensor, top_k: int, renormalizes: bool, loads: Tensor | None = None, counted: Tensor | None = None
) -> Routes:
    """Chooses by the softmax of the logits [t, experts] in float32. NaN counts as the least logit.

    renormalizes: a token's shares add up to 1. loads: int64 [experts], to which the pairs of each expert are added;
    counted: int32 [1], how many tokens are counted there, the others being padding; None: all.
    """
    num_tokens, num_experts = logits.shape
    assert logits.is_contiguous()
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    shares = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    rows, num_programs, turns = _divide(num_tokens, num_experts)
    counts = torch.empty(num_programs, num_experts, dtype=torch.int32, device=logits.device)
    pdl = can_follow(logits)
    if num_tokens:
        _route[(num_programs,)](
            logits,
            ids,
            shares,
            counts,
            loads,
            counted,
            num_tokens,
            turns,
            num_experts=num_experts,
            top_k=top_k,
            renormalizes=renormalizes,
            rows=rows,
            block=round_to_power(num_experts),
            pdl=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
    return Routes(ids, shares, counts)


def place(routes: Routes, first: int, num_own: int) -> Placement:
    """Orders the pairs of the rank's experts: `num_own` from `first` on."""
    (num_tokens, top_k), num_experts = routes.ids.shape, routes.counts.shape[1]
    pairs, places = torch.empty_like(routes.ids).view(-1), torch.empty_like(routes.ids).view(-1)
    rows, num_programs, turns = _divide(num_tokens, num_experts)
    ends = torch.empty(num_own, dtype=torch.int32, device=pairs.device)
    if num_tokens:
        _place[(num_programs,)](
            routes.ids,
            routes.counts,
            pairs,
            places,
            ends,
            num_tokens,
            turns,
            num_programs,
            num_experts=num_experts,
            top_k=top_k,
            first=first,
            num_own=num_own,
            rows=rows,
            programs=_COUNTS,
            block=round_to_power(num_experts),
            num_warps=4,
        )
    return Placement(pairs, places, ends)


def _divide(num_tokens: int, num_experts: int) -> tuple[int, int, int]:
    """Returns how many tokens a program handles at once, the number of programs, and how often each does so."""
    rows = max(1, min(_ROWS, _CELLS // round_to_power(num_experts)))
    turns = divide_up(num_tokens, rows * _MOST_PROGRAMS)
    return rows, divide_up(num_tokens, rows * max(1, turns)), turns


@launch_quickly
@triton.jit(do_not_specialize=["num_tokens", "turns"])
def _route(
    logits_at,
    ids_at,
    shares_at,
    counts_at,
    loads_at,
    counted_at,
    num_tokens,
    turns,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    renormalizes: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program routes `turns` times `rows` tokens."""
    follow(pdl)
    expert = tl.arange(0, block)
    counts = tl.zeros([block], tl.int32)
    loads = tl.zeros([block], tl.int32)
    num_counted = num_tokens
    if counted_at is not None:
        num_counted = tl.load(counted_at)
    for turn in range(turns):
        token = (tl.program_id(0) * turns + turn) * rows + tl.arange(0, rows)
        is_token = token < num_tokens
        within = is_token[:, None] & (expert < num_experts)[None, :]
        cells = token.to(tl.int64)[:, None] * num_experts + expert[None, :]
        logits = tl.load(logits_at + cells, mask=within, other=0.0).to(tl.float32)
        # Finite, so that what has been chosen and what is no expert are less than all others.
        logits = tl.where(logits > -3e38, tl.minimum(logits, 3e38), -3e38)
        logits = tl.where((expert < num_experts)[None, :], logits, float("-inf"))
        left, ranks = logits, tl.zeros([rows, block], tl.int32)
        for rank in tl.static_range(top_k):
            best = tl.max(left, 1)
            number = tl.min(tl.where(left == best[:, None], expert[None, :], block), 1)
            is_best = expert[None, :] == number[:, None]
            left = tl.where(is_best, float("-inf"), left)
            ranks = tl.where(is_best, rank, ranks)
        is_chosen = (left == float("-inf")) & (expert < num_experts)[None, :]
        shares = tl.exp(logits - tl.max(logits, 1)[:, None])
        shares /= tl.sum(tl.where(is_chosen, shares, 0.0) if renormalizes else shares, 1)[:, None]
        is_chosen &= is_token[:, None]
        pairs = token[:, None] * top_k + ranks
        tl.store(ids_at + pairs, tl.broadcast_to(expert[None, :], [rows, block]), mask=is_chosen)
        tl.store(shares_at + pairs, shares, mask=is_chosen)
        counts += tl.sum(is_chosen.to(tl.int32), 0)
        loads += tl.sum((is_chosen & (token < num_counted)[:, None]).to(tl.int32), 0)
    tl.store(counts_at + tl.program_id(0) * num_experts + expert, counts, mask=expert < num_experts)
    if loads_at is not None:
        tl.atomic_add(loads_at + expert, loads.to(tl.int64), mask=(expert < num_experts) & (loads > 0), sem="relaxed")


@launch_quickly
@triton.jit(do_not_specialize=["num_tokens", "turns", "num_programs"])
def _place(
    ids_at,
    counts_at,
    pairs_at,
    places_at,
    ends_at,
    num_tokens,
    turns,
    num_programs,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    first: tl.constexpr,
    num_own: tl.constexpr,
    rows: tl.constexpr,
    programs: tl.constexpr,
    block: tl.constexpr,
):
    """One program places the pairs of the tokens that the program of `_route` with its number has routed."""
    expert = tl.arange(0, block)
    is_own = (expert >= first) & (expert < first + num_own)
    before = tl.zeros([block], tl.int32)  # pairs of each expert of the programs before
    counts = tl.zeros([block], tl.int32)
    for begin in range(0, num_programs, programs):
        program = begin + tl.arange(0, programs)
        part = tl.load(
            counts_at + program[:, None] * num_experts + expert[None, :],
            mask=(program < num_programs)[:, None] & is_own[None, :],
            other=0,
        )
        counts += tl.sum(part, 0)
        before += tl.sum(tl.where((program < tl.program_id(0))[:, None], part, 0), 0)
    ends = tl.cumsum(counts, 0)
    if tl.program_id(0) == 0:
        tl.store(ends_at + expert - first, ends, mask=is_own)
    free = ends - counts + before  # each expert's next place
    for turn in range(turns):
        token = (tl.program_id(0) * turns + turn) * rows + tl.arange(0, rows)
        is_token = token < num_tokens
        ranks = tl.full([rows, block], -1, tl.int32)
        for rank in tl.static_range(top_k):
            number = tl.load(ids_at + token * top_k + rank, mask=is_token, other=-1)
            ranks = tl.where(expert[None, :] == number[:, None], rank, ranks)
        chosen = (ranks >= 0).to(tl.int32)
        places = tl.where(is_own[None, :], free[None, :] + tl.cumsum(chosen, 0) - chosen, -1)
        free += tl.sum(chosen, 0)
        pairs = token[:, None] * top_k + ranks
        tl.store(places_at + pairs, places, mask=ranks >= 0)
        tl.store(pairs_at + places, pairs, mask=(ranks >= 0) & is_own[None, :])
