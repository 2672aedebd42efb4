"""Rows for the sampling kernels, and what they have to draw, by definition and in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toka_async.kernels.sampling.kernels import RowTable, SamplingKernels
from toka_async.messages import TokenSampling
from toka_async.model import rng as streams
from toka_async.model.rng import Float64
from toka_async.model.sampling import Flag, Params, make_params

INDEX = 5  # of every draw
_NUM_PROMPT = 7


def name_of(value: object) -> str | None:
    """Of a test's case: what its sampling parameters set. Their own text differs from process to process."""
    if not isinstance(value, TokenSampling):
        return None
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: getattr(value, name) for name in names if getattr(value, name) != getattr(TokenSampling(), name)}
    return " ".join(f"{name}={value:g}" for name, value in values.items()) or "plain"


def table_of(
    samplings: Sequence[TokenSampling], seen: npt.NDArray[np.bool_], device: torch.device
) -> tuple[Params, RowTable]:
    """A slot for each; seen: [n, vocab]. Slot i has seed i."""
    params = np.concatenate([make_params(sampling) for sampling in samplings])
    num = params.size

    def column(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values.copy()).to(device)

    padded = np.pad(seen, ((0, 0), (0, -seen.shape[1] % 32)))
    return params, RowTable(
        temperature=column(params["temperature"]),
        top_p=column(params["top_p"]),
        min_p=column(params["min_p"]),
        repetition=column(params["repetition"]),
        top_k=column(params["top_k"]),
        flags=column(params["flags"]),
        num_prompt=column(np.full(num, _NUM_PROMPT, dtype=np.int32)),
        seeds=column(np.arange(num, dtype=np.int64)),
        seen=column(np.packbits(padded, axis=1, bitorder="little").view(np.int32)),
    )


def draw(kernels: SamplingKernels, logits: Tensor, table: RowTable, slots: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Number INDEX of each row's stream, on the host; slots: those of the rows, or slot i for row i."""
    device = table.flags.device
    at = torch.tensor(list(slots) or list(range(len(logits))), device=device)
    contexts = torch.full((len(logits),), _NUM_PROMPT + INDEX, dtype=torch.int32, device=device)
    tokens, logprobs = kernels.draw(logits.to(device), at, contexts, table)
    return tokens.cpu(), logprobs.cpu()


def uniforms_of(num: int) -> Float64:
    """The numbers of rows in slots 0 to num."""
    return streams.draw_uniforms(np.arange(num), np.full(num, INDEX))


def penalised(logits: Tensor, params: Params, seen: npt.NDArray[np.bool_]) -> Tensor:
    """Float32 logits after the repetition penalty."""
    x = logits.float()
    penalty = torch.from_numpy(params["repetition"].copy())[:, None]
    on = torch.from_numpy(seen & ((params["flags"] & Flag.REPETITION) != 0)[:, None])
    return torch.where(on, torch.where(x > 0, x / penalty, x * penalty), x)


def weights_of(logits: Tensor, params: np.void) -> Float64:
    """exp((logit - largest) / temperature) of one row."""
    x = logits.double().numpy()
    weights: Float64 = np.exp((x - x.max()) / float(params["temperature"]))
    return weights


def kept_by(weights: Float64, params: np.void) -> npt.NDArray[np.bool_]:
    """Which tokens of one row pass its filters: one after the other, likeliest first, ties by lowest id."""
    by_weight = np.argsort(-weights, kind="stable")
    kept = weights[by_weight] >= params["min_p"]
    if params["top_k"] > 0:
        kept[params["top_k"] :] = False
    mass = np.where(kept, weights[by_weight], 0)
    if params["top_p"] < 1:
        kept &= np.cumsum(mass) - mass < float(params["top_p"]) * mass.sum()
    result = np.zeros(weights.size, dtype=np.bool_)
    result[by_weight[kept]] = True
    result[by_weight[0]] = True
    return result


def rejected_until_kept(
    weights: Float64, params: np.void, seed: int, covered: npt.NDArray[np.bool_] | None
) -> tuple[int, int]:
    """The token that rejection with pivots ends at, and how many proposals it took.

    covered: what the first proposal comes from; None: there is none before the first round.
    """
    start = streams._mix(np.array([seed], dtype=np.int64).view(np.uint64))
    golden = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    bits = streams._mix(start + np.uint64(INDEX + 1) * golden)
    kept = kept_by(weights, params)
    by_weight = np.argsort(-weights, kind="stable")
    rank = np.empty(weights.size, dtype=np.int64)
    rank[by_weight] = np.arange(weights.size)
    allowed = weights >= params["min_p"]
    if params["top_k"] > 0:
        allowed &= weights >= weights[by_weight[min(int(params["top_k"]), weights.size) - 1]]
    bound, number, token = weights.size, np.uint64(0), -1
    if covered is not None:
        token = _invert(np.where(covered, weights, 0), bits)
        bound = rank[token]
    while token < 0 or not kept[token]:
        number += np.uint64(1)
        token = _invert(np.where(allowed & (rank < bound), weights, 0), streams._mix(bits + number * golden))
        bound = rank[token]
    return token, int(number) + (covered is not None)


def _invert(weights: Float64, bits: npt.NDArray[np.uint64]) -> int:
    running = np.cumsum(weights)
    uniform = (bits >> np.uint64(11)).astype(np.float64)[0] * 2.0**-53
    return int(np.searchsorted(running, uniform * running[-1], side="right"))
