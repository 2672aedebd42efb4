"""Chooses the next tokens: exact, and vectorised over rows that each have their own parameters.

The order is vLLM's: allowed tokens, logit bias and forbidden end tokens, then repetition, frequency and presence
penalties (all in `penalties`), then temperature, min_p, top_k and top_p. Each filter works on the renormalised rest of
the one before. Tokens rank by probability, ties by lowest id, so top_k 1 is greedy.

A draw inverts the cumulative distribution at one uniform number per row: it depends on the row's own logits, parameters
and number only. NaN logits count as -inf; a row without any finite logit gives id 0. Knows no requests, no slots and no
seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntFlag

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.attention.copies import to_device
from toka_async.messages import LogprobKind, TokenSampling
from toka_async.model.rng import Float64

# One row of sampling parameters; one operation gathers a table of them by slot.
PARAMS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("min_tokens", np.int32),
        ("num_logprobs", np.int32),
        ("flags", np.int32),
    ]
)
Params = npt.NDArray[np.void]


class Flag(IntFlag):
    """A need of a row beyond the argmax."""

    RANDOM = 1
    FILTERED = 2  # min_p, top_k or top_p is on
    BIASED = 4
    MIN_TOKENS = 8
    REPETITION = 16
    COUNTED = 32  # presence or frequency penalty
    LOGPROBS = 64
    ALLOWED = 128  # only some token ids are allowed
    SCALED = 512  # log-probs are of the distribution after edits and temperature
    KEPT = 1024  # and of the tokens that the filters keep, whose number and mass are wanted
    MASKED = 4096  # only what a grammar allows, which differs from token to token
    # 256 and 2048 are flags of the kernels alone.


EDITS = Flag.MASKED | Flag.ALLOWED | Flag.BIASED | Flag.MIN_TOKENS | Flag.REPETITION | Flag.COUNTED

# Filters look at the likeliest tokens, then at more of them where these do not decide, at last at all of them.
_WIDTHS = (64, 1024)
# Vocabularies above the limit are summed in blocks, and the inverse is searched within one of them.
_BLOCK = 256
_BLOCKS_ABOVE = 4096
_LARGEST_SHARE = 1 - 2.0**-53


def make_params(sampling: TokenSampling) -> Params:
    scaled = sampling.num_logprobs >= 0 and sampling.logprob_kind is not LogprobKind.RAW
    # A draw of the likeliest token alone is greedy, but its log-prob is of the distribution at its temperature.
    random = sampling.temperature > 0 and (sampling.top_k != 1 or scaled)
    filtered = random and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)
    flags = (
        Flag.RANDOM * random
        | Flag.FILTERED * filtered
        | Flag.ALLOWED * bool(sampling.allowed_ids)
        | Flag.BIASED * bool(sampling.bias_ids)
        # A grammar's masks hold end tokens back, as far as there is anything else to draw.
        | Flag.MIN_TOKENS * (sampling.min_tokens > 0 and bool(sampling.end_ids) and not sampling.grammar)
        | Flag.MASKED * bool(sampling.grammar)
        | Flag.REPETITION * (sampling.repetition_penalty != 1)
        | Flag.COUNTED * (sampling.presence_penalty != 0 or sampling.frequency_penalty != 0)
        | Flag.LOGPROBS * (sampling.num_logprobs >= 0)
        | Flag.SCALED * scaled
        | Flag.KEPT * (filtered and sampling.wants_kept)
    )
    values = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.top_k,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
        sampling.min_tokens,
        sampling.num_logprobs,
        int(flags),
    )
    return np.array([values], dtype=PARAMS)


def clean(logits: Tensor) -> Tensor:
    """Replaces NaN by -inf and +inf by the largest finite number, in place."""
    return logits.nan_to_num_(nan=-torch.inf, posinf=torch.finfo(logits.dtype).max, neginf=-torch.inf)


def sample(logits: Tensor, params: Params, uniform: Float64) -> Tensor:
    """Chooses a token for each row; returns token ids, int64 [s].

    logits: [s, vocab], cleaned, any floating dtype. params: PARAMS [s]. uniform: [s], numbers in [0, 1); unused for
    greedy rows.
    """
    kinds = params["flags"] & (Flag.RANDOM | Flag.FILTERED)
    if int(kinds.min()) == int(kinds.max()):
        every = _sample_filtered if kinds[0] & Flag.FILTERED else _sample_plain if kinds[0] else _sample_greedy
        return every(logits, params, uniform)
    tokens = logits.argmax(-1)
    plain, filtered = kinds == Flag.RANDOM, kinds > Flag.RANDOM
    for chosen, draw in ((plain, _sample_plain), (filtered, _sample_filtered)):
        if chosen.any():
            rows = to_device(np.flatnonzero(chosen), logits.device)
            tokens[rows] = draw(logits[rows], params[chosen], uniform[chosen])
    return tokens


def sample_alone(logits: Tensor, params: Params, uniform: Float64) -> Tensor:
    """Does as `sample`, row by row: on a GPU torch sums a row in an order that depends on the number of rows."""
    rows = [slice(row, row + 1) for row in range(len(logits))]
    return torch.cat([sample(logits[row], params[row], uniform[row]) for row in rows])


def find_likeliest(values: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Returns the `num` largest of each row of values [s, n] and their indices, [s, num] each; ties by lowest index.

    If the last value ties with values left out, it is undefined which of them are in.
    """
    if num >= values.shape[1]:
        return values.sort(dim=1, descending=True, stable=True)
    top, ids = values.topk(num, dim=1)
    ids, by_id = ids.sort(dim=1)
    top, by_value = top.gather(1, by_id).sort(dim=1, descending=True, stable=True)
    return top, ids.gather(1, by_value)


def _sample_greedy(logits: Tensor, params: Params, uniform: Float64) -> Tensor:  # noqa: ARG001
    return logits.argmax(-1)


def _sample_plain(logits: Tensor, params: Params, uniform: Float64) -> Tensor:
    temperature, target = _upload(logits.device, params["temperature"], uniform)
    return invert(_weights(logits, temperature), target)


def _sample_filtered(logits: Tensor, params: Params, uniform: Float64) -> Tensor:
    """[r, vocab] -> [r]"""
    temperature, target = _upload(logits.device, params["temperature"], uniform)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    for rows, kept, ids in _filter(_weights(logits, temperature), params, logits.shape[1]):
        # The order of ids makes a draw robust: rounding that swaps two almost equal weights hardly moves it.
        ids, by_id = ids.sort(dim=1)
        tokens[rows] = ids.gather(1, invert(kept.gather(1, by_id), target[rows])[:, None])[:, 0]
    return tokens


def measure_filters(logits: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """Returns how many tokens the filters of each row keep, int64 [r], and their share of the weight, float64 [r].

    logits: [r, vocab], cleaned, as `sample` gets them. params: PARAMS [r], of rows that are filtered. Tokens without
    any weight do not count as kept.
    """
    (temperature,) = _upload(logits.device, params["temperature"])
    padded = _weights(logits, temperature)
    num_kept = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    masses = torch.ones(len(logits), dtype=torch.float64, device=logits.device)
    totals = _sum_blocks(padded)
    for rows, kept, _ in _filter(padded, params, logits.shape[1]):
        num_kept[rows] = (kept > 0).sum(-1)
        masses[rows] = kept.sum(-1, dtype=torch.float64) / totals[rows]
    return num_kept, masses.clamp_(max=1)


def _filter(padded: Tensor, params: Params, vocab: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Filters rows of `_weights`; a later result of a row replaces an earlier one.

    Tries few candidates first: sorting a vocabulary costs more than all the rest. Yields the rows, int64 [r], the
    weights of their candidates, likeliest first and 0 where not kept, float32 [r, c], and the candidates' ids, [r, c].
    """
    filters = _upload(padded.device, *(params[name] for name in ("top_p", "min_p", "top_k")))
    weights = padded[:, :vocab]
    rows = torch.arange(len(weights), device=padded.device)
    for width in (*(w for w in _WIDTHS if w < vocab), vocab):
        candidates, ids = find_likeliest(weights[rows], width)
        total = _sum_blocks(padded[rows]) if width < vocab else None
        num_kept, decided = _count_kept(candidates, total, *(f[rows] for f in filters))
        kept = torch.where(torch.arange(width, device=rows.device) < num_kept[:, None], candidates, 0)
        yield rows, kept, ids
        if bool(decided.all()):
            return
        rows = rows[~decided]


def _count_kept(
    candidates: Tensor, total: Tensor | None, top_p: Tensor, min_p: Tensor, top_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns how many of a row's candidates pass its filters, int64 [r] >= 1, and whether they decide that, bool [r].

    Args:
        candidates: [r, c]: the largest weights, in descending order, the first of them 1.
        total: float64 [r]: the weight of the whole vocabulary; None: the candidates are all of it.
        top_p, min_p, top_k: float64 [r]; 1, 0 and 0 are off.
    """
    weights = candidates.double()
    width = weights.shape[1]
    limit = torch.where(top_k > 0, top_k, torch.inf)
    num_kept = torch.minimum((weights >= min_p[:, None]).sum(-1), limit).long().clamp(1, width)
    sums = weights.cumsum(-1)
    mass = sums.gather(1, num_kept[:, None] - 1)
    if total is not None:
        # All tokens pass min_p and top_k, so top_p applies to the whole vocabulary.
        unlimited = (top_k == 0) & (min_p == 0)
        mass = torch.where(unlimited, total, mass[:, 0])[:, None]
    # The smallest set that reaches top_p: a token is in while the mass before it is below.
    before = sums - weights
    in_nucleus = (before < top_p[:, None] * mass) | (top_p[:, None] >= 1)
    nucleus = in_nucleus.sum(-1).clamp(min=1)
    if total is None:
        return torch.minimum(num_kept, nucleus), torch.ones_like(nucleus, dtype=torch.bool)
    cut = num_kept < width
    num_kept = torch.minimum(num_kept, nucleus)
    # The last kept token must lie strictly above the last candidate, because ties of that may have been left out.
    apart = weights.gather(1, num_kept[:, None] - 1)[:, 0] > weights[:, -1]
    return num_kept, apart & (cut | (unlimited & (nucleus < width)))


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Returns the index where a row's running sum of weights first exceeds `uniform` of its total.

    weights: float32 [r, n], >= 0. uniform: float64 [r], in [0, 1). The result, int64 [r], has a positive weight, or is
    0 where no weight is positive.
    """
    if weights.shape[1] <= _BLOCKS_ABOVE:
        return _search(weights.cumsum(-1, dtype=torch.float64), uniform[:, None])[:, 0]
    blocks = F.pad(weights, (0, -weights.shape[1] % _BLOCK)).reshape(len(weights), -1, _BLOCK)
    sums = blocks.sum(-1)
    running = sums.cumsum(-1, dtype=torch.float64)
    block = _search(running, uniform[:, None])
    # The position of the target within its block, as a share of the block.
    size = sums.gather(1, block).double()
    share = (uniform[:, None] * running[:, -1:] - running.gather(1, block)) / size + 1
    share = share.nan_to_num_(0).clamp_(0, _LARGEST_SHARE)
    inner = _search(
        blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].cumsum(-1, dtype=torch.float64), share
    )
    return (block * _BLOCK + inner)[:, 0]


def _sum_blocks(weights: Tensor) -> Tensor:
    """Sums rows of `_weights` in float64, [r]; in blocks, as torch shares a long single row among its threads."""
    blocks = weights.view(len(weights), -1, _BLOCK) if weights.shape[1] > _BLOCKS_ABOVE else weights[:, None]
    return blocks.sum(-1, dtype=torch.float64).sum(-1)


def _search(running: Tensor, share: Tensor) -> Tensor:
    """Returns the first index of running sums [r, n] above `share` [r, 1] of the last; 0 in rows of zeros. int64 [r,
    1]."""
    index = torch.searchsorted(running, share * running[:, -1:], right=True)
    return index.remainder_(running.shape[1])  # a share below 1 finds no index in rows of zeros only


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Returns exp((logits - their maximum) / temperature), float32 [r, vocab or a little more, the rest 0].

    The maximum is subtracted first: no temperature overflows, and the likeliest token's weight is 1.
    """
    rows, vocab = logits.shape
    largest = logits.amax(-1, keepdim=True).float().clamp_(min=torch.finfo(torch.float32).min)
    divisor = temperature.float()[:, None]
    if vocab <= _BLOCKS_ABOVE:
        return torch.sub(logits, largest).div_(divisor).exp_()
    weights = torch.empty(rows, -(-vocab // _BLOCK) * _BLOCK, dtype=torch.float32, device=logits.device)
    weights[:, vocab:] = 0
    torch.sub(logits, largest, out=weights[:, :vocab]).div_(divisor).exp_()
    return weights


def _upload(device: torch.device, *columns: npt.NDArray[np.generic]) -> list[Tensor]:
    """Copies host columns [r] to the device as float64 tensors, in one copy."""
    return list(to_device(np.array(columns, dtype=np.float64), device).unbind())
